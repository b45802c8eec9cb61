"""One configuration for DeepSpeed itself, for shardwise and for plain torch: the same losses, the same weights.

What DeepSpeed 0.19.8 ended with is in tests/data/deepspeed_training.safetensors (tests/data/make_deepspeed_training.py
wrote it); where DeepSpeed is installed, it is run again.

Several engines of one loss, in fp16 too: what each trains is what plain PyTorch trains.
"""

import functools
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise.deepspeed
from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

DATA = Path(__file__).parents[2] / "data"
GENERATOR, STORED = DATA / "make_deepspeed_training.py", DATA / "deepspeed_training.safetensors"


def _recipe() -> Any:
    spec = importlib.util.spec_from_file_location(GENERATOR.stem, GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = _recipe()
CASES = {case.name: case for case in recipe.CASES}
Ended = tuple[dict[str, Tensor], Tensor]  # the weights and the mean loss of each step
LIMIT = 1e-6
# With 16 bits stage 1 adds the passes up before it reduces, in DeepSpeed and here; plain torch takes the mean over
# ranks of each pass, as stages 2 and 3 do. The difference is rounding.
ROUNDED = {"stage1-2passes-clip0.05-bf16": 1e-4}


def by_deepspeed(path: Path) -> dict[str, Ended]:
    stored = load_file(path)
    found = {}
    for name in CASES:
        prefix = f"{name}/weights/"
        state = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        found[name] = state, stored[f"{name}/losses"]
    return found


def _scheduled(model: Any) -> torch.optim.Optimizer:
    """AdamW whose rate is what DeepSpeed's documentation says of WarmupLR."""
    options = {**recipe.ADAMW, "betas": tuple(recipe.ADAMW["betas"])}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    steps = iter(range(recipe.STEPS))

    def set_rate(*_: Any) -> None:
        share = min(max(next(steps) - 1, 0) / recipe.WARM, 1.0)
        optimizer.param_groups[0]["lr"] = recipe.LOW + (recipe.HIGH - recipe.LOW) * share

    optimizer.register_step_pre_hook(set_rate)
    return optimizer


def by_torch(name: str) -> Ended:
    case = CASES[name]
    half = case.dtype if case.precision == "bf16" else None
    plain = PlainRecipe(max_norm=case.clip, param_dtype=half, mean_over_micro_batches=True)
    loss = functools.partial(recipe.loss_of, dtype=case.dtype)
    run = train_plain(recipe.net, loss, _scheduled, recipe.batches(case.accumulation), plain)
    if case.clip:
        assert min(run.norms) > 1.5 * case.clip, (name, run.norms)  # so that clipping means something
    return run.masters[-1], torch.tensor(run.losses).mean((1, 2))


def by_shardwise(names: list[str]) -> dict[str, Ended]:
    found = {}
    for name in names:
        case = CASES[name]
        with warnings.catch_warnings(action="ignore"):
            engine, losses = recipe.train(shardwise.deepspeed, case, torch.distributed.get_rank())
        found[name] = close(engine), losses
    return found


def check(found: Ended, expected: Ended, limit: float, what: str) -> None:
    """NaN is a difference."""
    assert found[0].keys() == expected[0].keys(), what
    worst = {key: float((value - expected[0][key]).abs().max()) for key, value in found[0].items()}
    assert all(difference <= limit for difference in worst.values()), (what, worst)
    losses = (found[1] - expected[1]).abs()
    assert bool((losses <= limit).all()), (what, found[1].tolist(), expected[1].tolist())


def check_all(
    found: dict[str, Ended], expected: dict[str, Ended], who: str, limits: Mapping[str, float] = MappingProxyType({})
) -> None:
    assert found
    for name, ended in found.items():
        check(ended, expected[name], limits.get(name, LIMIT), f"{who}, {name}")


def test_deepspeed_itself_equals_plain_torch() -> None:
    """So that what the others are compared with is no fault of DeepSpeed's."""
    stored = by_deepspeed(STORED)
    check_all({name: by_torch(name) for name in CASES}, stored, "plain torch and DeepSpeed", ROUNDED)
    ended = [state["0.weight"] for name, (state, _) in stored.items() if "stage1" in name and "fp32" in name]
    closest = min(float((a - b).abs().max()) for i, a in enumerate(ended) for b in ended[:i])
    assert len(ended) == 4 and closest > 1e-4, "clipping and accumulation change what is trained"


@pytest.mark.parametrize("quick", [True, *full(False)], ids=["clipped", "others"])
def test_a_configuration_trains_what_deepspeed_trains(quick: bool) -> None:
    """Two passes a step that are clipped, at every stage and in both number formats; and the others."""
    stored = by_deepspeed(STORED)
    assert stored.keys() == CASES.keys()
    names = [name for name, case in CASES.items() if (case.accumulation == 2 and case.clip > 0) is quick]
    assert len(names) == (6 if quick else 12)
    for found in run_ranks(recipe.RANKS, by_shardwise, names):
        assert list(found) == names
        check_all(found, stored, "shardwise.deepspeed and DeepSpeed")


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_still_trains_what_is_stored(tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    run = subprocess.run(
        [sys.executable, str(GENERATOR), str(again)], capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    check_all(by_deepspeed(again), by_deepspeed(STORED), "DeepSpeed here and DeepSpeed 0.19.8")


STEPS, RATE, FACTORS = 3, 0.5, (1.0, 0.5)
HALF = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for param in model.parameters():
        param.data = param.data.half().float()
    return model


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def combined(models: list[Any], dtype: torch.dtype, step: int, rank: int) -> Tensor:
    inputs, targets = batch(step, rank)
    losses = [nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets) for model in models]
    return sum((f * loss for f, loss in zip(FACTORS, losses, strict=True)), torch.zeros(()))


def plain(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """SGD on fp32 masters, with the mean of two ranks' gradients of models in ``dtype``."""
    masters = [net(seed) for seed in (1, 2)]
    for step in range(STEPS):
        models = [net(1).to(dtype), net(2).to(dtype)]
        for master, model in zip(masters, models, strict=True):
            model.load_state_dict(master.state_dict())
        for rank in range(2):
            (combined(models, dtype, step, rank) / 2).backward()
        with torch.no_grad():
            for master, model in zip(masters, models, strict=True):
                for weight, param in zip(master.parameters(), model.parameters(), strict=True):
                    weight -= RATE * param.grad.float()  # type: ignore[union-attr]
    return [master.state_dict() for master in masters]


def engines(precision: str, stage: int) -> list[Any]:
    config = ds_config(stage, 4, optimizer=optimizer_block("SGD", lr=RATE), **HALF[precision])
    return [start(net(seed), config) for seed in (1, 2)]


QUICK = [("fp32", 3), ("fp16", 1), ("fp16", 2)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "stage"),
    [*QUICK, *full(*((name, stage) for name in HALF for stage in (1, 2, 3) if (name, stage) not in QUICK))],
)
def test_one_loss_of_several_engines(precision: str, stage: int) -> None:
    made, rank = engines(precision, stage), torch.distributed.get_rank()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(STEPS):
            combined([engine.module for engine in made], DTYPES[precision], step, rank).backward()
            for engine in made:
                engine._backward_epilogue()
                engine.step()
    told = [str(each.message) for each in caught if "of an unscaled loss" in str(each.message)]
    assert len(told) == (2 if precision == "fp16" else 0)  # each engine once
    for engine, want in zip(made, plain(DTYPES[precision]), strict=True):
        rtol = 1e-6 if precision == "fp32" else 2e-3
        assert_close(close(engine), want, rtol=rtol, what=f"{precision}, stage {stage}")
