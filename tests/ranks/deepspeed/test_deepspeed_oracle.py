"""Losses and weights of one configuration are equal under DeepSpeed itself, shardwise.deepspeed and plain torch.

tests/data/deepspeed_training.safetensors has the results of DeepSpeed 0.19.8; tests/data/make_deepspeed_training.py
wrote it, and runs again if DeepSpeed is installed. One loss of several engines trains as in plain torch, also in fp16.
"""

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
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
Ended = tuple[dict[str, Tensor], Tensor]  # the final weights, and the mean loss of each step
LIMIT = 1e-6


def by_deepspeed(path: Path) -> dict[str, Ended]:
    stored = load_file(path)
    found = {}
    for name in CASES:
        prefix = f"{name}/weights/"
        state = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        found[name] = state, stored[f"{name}/losses"]
    return found


def by_shardwise(names: list[str]) -> dict[str, Ended]:
    found = {}
    for name in names:
        case = CASES[name]
        with warnings.catch_warnings(action="ignore"):
            engine, losses = recipe.train(shardwise.deepspeed, case, torch.distributed.get_rank())
        found[name] = close(engine), losses
    return found


def check_all(found: dict[str, Ended], expected: dict[str, Ended]) -> None:
    """Compare weights and losses; NaN is a difference."""
    for name, (state, losses) in found.items():
        there, their_losses = expected[name]
        assert state.keys() == there.keys(), name
        worst = {key: float((value - there[key]).abs().max()) for key, value in state.items()}
        assert all(difference <= LIMIT for difference in worst.values()), (name, worst)
        assert bool(((losses - their_losses).abs() <= LIMIT).all()), (name, losses.tolist(), their_losses.tolist())


@pytest.mark.parametrize("quick", [True, *full(False)], ids=["clipped", "others"])
def test_training_equals_stored_results_of_deepspeed(quick: bool) -> None:
    """``quick`` tests steps of two clipped passes at every stage and in both number formats; else all other cases."""
    stored = by_deepspeed(STORED)
    assert stored.keys() == CASES.keys()
    names = [name for name, case in CASES.items() if (case.accumulation == 2 and case.clip > 0) is quick]
    assert len(names) == (6 if quick else 12)
    for found in run_ranks(recipe.RANKS, by_shardwise, names):
        assert list(found) == names
        check_all(found, stored)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_stored_results_equal_installed_deepspeed(tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    run = subprocess.run(
        [sys.executable, str(GENERATOR), str(again)], capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    check_all(by_deepspeed(again), by_deepspeed(STORED))


STEPS, RATE, FACTORS = 3, 0.5, (1.0, 0.5)
HALF = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for param in model.parameters():
        param.data = param.data.half().float()
    return model


def both() -> nn.ModuleList:
    return nn.ModuleList([net(1), net(2)])


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def combined(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs = batch[0].to(next(iter(models[0].parameters())).dtype)
    losses = [nn.functional.mse_loss(model(inputs).float(), batch[1]) for model in models]
    return sum((f * loss for f, loss in zip(FACTORS, losses, strict=True)), torch.zeros(()))


def sgd(models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(models.parameters(), lr=RATE)


QUICK = [("fp32", 3), ("fp16", 1), ("fp16", 2)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "stage"),
    [*QUICK, *full(*((name, stage) for name in HALF for stage in (1, 2, 3) if (name, stage) not in QUICK))],
)
def test_one_loss_of_several_engines(precision: str, stage: int) -> None:
    config = ds_config(stage, 4, optimizer=optimizer_block("SGD", lr=RATE), **HALF[precision])
    made, rank = [start(model, config) for model in both()], torch.distributed.get_rank()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(STEPS):
            combined([engine.module for engine in made], batch(step, rank)).backward()
            for engine in made:
                engine._backward_epilogue()
                engine.step()
    told = [str(each.message) for each in caught if "of an unscaled loss" in str(each.message)]
    assert len(told) == (2 if precision == "fp16" else 0)  # one warning per engine
    batches = [[[batch(step, rank) for rank in range(2)]] for step in range(STEPS)]
    recipe = PlainRecipe(param_dtype=torch.float16 if precision == "fp16" else None)
    expected = train_plain(both, combined, sgd, batches, recipe).masters[-1]
    found = {f"{number}.{name}": value for number, engine in enumerate(made) for name, value in close(engine).items()}
    assert_close(found, expected, 1e-6 if precision == "fp32" else 2e-3, f"{precision}, stage {stage}")
