"""Accelerate on two ranks: ``save_state``, ``load_state`` and their hooks, clipping, and launchers.

Norms and weights agree with plain PyTorch in one process within 1e-5 in fp32 (relative to each tensor's largest
element), since sums over a batch are added in another order.
"""

import gc
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_huggingface import points
from torch import Tensor, nn

from shardwise.plan import Plan, replicated, zero
from shardwise.testing import assert_close
from tests.support.ds_setup import close, ds_config, start
from tests.support.huggingface_setup import RANKS, launched, quiet
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

pytest.importorskip("accelerate")


def line(value: float) -> nn.Module:
    """Return a layer with 5 x 3 weights, all ``value``, and a bias of 0."""
    model = nn.Linear(3, 5)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    return model


def accelerator_of(plan: Plan, **options: Any) -> Any:
    from shardwise.huggingface import ShardwiseAccelerator

    return ShardwiseAccelerator(plan=plan, cpu=True, **options)


def scaled() -> Plan:
    """Return an accelerator with a loss scale, which allows no second model in a backward pass."""
    plan = zero(3, torch.float16)
    return plan.but(scaler=replace(plan.precision.scaler, initial_scale=4.0))  # type: ignore[type-var]


def prepared(accelerator: Any, value: float) -> tuple[Any, Any]:
    model = line(value)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Step so that every weight decreases by 0.5."""
    accelerator.backward(model(torch.ones(1, 3)).sum().float())
    optimizer.step()
    optimizer.zero_grad()


def weight_of(model: Any) -> Tensor:
    return model.state_dict()["weight"].clone()


# ---- one model after the other


@on_ranks(RANKS)
@pytest.mark.parametrize("release", ["free_memory", *full("clear")])
def test_state_has_the_models_that_are_prepared_now(release: str, tmp_path: Path) -> None:
    """Prepare three models one after the other; check what a new process loads from their states.

    Check also which sessions end when a model is released.
    """
    folder = str(tmp_path)
    with launched(), quiet():
        accelerator = accelerator_of(scaled())
        sessions = []
        for fold in range(3):
            model, optimizer = prepared(accelerator, 8.0 * (fold + 1))
            sessions.append(weakref.ref(accelerator.session_of(model)))
            step(accelerator, model, optimizer)
            accelerator.save_state(f"{folder}/fold{fold}")
            getattr(accelerator, release)()
        assert weight_of(model)[0, 0] == 23.5  # the user still has it
        del model, optimizer
        gc.collect()
        left = [ref() is None for ref in sessions]
        found = []
        for fold in range(3):
            fresh = accelerator_of(scaled())
            model, _ = prepared(fresh, 0.0)
            fresh.load_state(f"{folder}/fold{fold}")
            found.append(float(weight_of(model)[0, 0]))
            fresh.close()
        accelerator.close()
    assert found == [7.5, 15.5, 23.5] and left == [True] * 3
    assert len(list(Path(folder, "fold2").glob("shardwise_*"))) == 1


@on_ranks(RANKS)
def test_freed_models_that_are_prepared_again_train_on(tmp_path: Path) -> None:
    """Freed models train on after they are prepared again (alone or through their optimizer) or used as they are."""
    folder = str(tmp_path / "state")
    with launched(), quiet():
        accelerator = accelerator_of(scaled())
        first, one = prepared(accelerator, 8.0)
        second, two = prepared(accelerator, 16.0)
        session = accelerator.session_of(first)
        accelerator.free_memory()
        assert accelerator.session_of(first) is session
        accelerator.prepare(one)
        step(accelerator, first, one)  # alone: the second model has no part in it
        assert accelerator.prepare(second) is second
        accelerator.free_memory()
        accelerator.prepare(second)
        step(accelerator, second, two)
        accelerator.save_state(folder)
        accelerator.free_memory(second, two)
        assert accelerator.session_of(second) is None
        step(accelerator, first, one)  # the only model that is left, although it was not prepared again
        assert weight_of(first)[0, 0] == 7.0
        fresh = accelerator_of(scaled())
        third, _ = prepared(fresh, 0.0)
        fresh.load_state(folder)
        assert weight_of(third)[0, 0] == 15.5
        for each in (accelerator, fresh):
            each.close()
    assert len(list(Path(folder).glob("shardwise_*"))) == 1


# ---- hooks


class Saved(nn.Module):
    """Has ``save_pretrained``, as models of diffusers and transformers do."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner = line(value)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)

    def save_pretrained(self, path: str) -> None:
        torch.save(self.state_dict(), path)


def made(accelerator: Any, value: float) -> Any:
    model = Saved(value)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))


@on_ranks(RANKS)
@pytest.mark.parametrize(("stage", "dtype"), [(3, torch.bfloat16), *full((3, None), (2, torch.bfloat16))])
def test_hooks_receive_sharded_models(stage: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Check what hooks like those of diffusers' programs receive, what is written, and what is loaded."""
    seen: list[Any] = []
    folder, rank, exact = str(tmp_path / "state"), dist.get_rank(), 0.5 + 2.0**-12
    shown = exact if dtype is None else 0.5
    with launched(), quiet():
        accelerator = accelerator_of(zero(stage, dtype))
        whole = accelerator.prepare_model(line(3.0), evaluation_mode=True)
        model, optimizer = made(accelerator, 1.0 + 2.0**-12)  # a value that 16 bits cannot represent
        step(accelerator, model, optimizer)
        first = accelerator.is_main_process

        def save(models: list[Any], weights: list[dict[str, Tensor]], path: str) -> None:
            seen.append(([type(accelerator.unwrap_model(each)).__name__ for each in models], list(map(len, weights))))
            if first:
                seen.append(float(weights[1]["inner.weight"][4, 2]))
                models[1].save_pretrained(f"{path}/unet")
            weights.pop()
            if not first:
                seen.append(float(models[1].inner.weight[4, 2]))

        def load(models: list[Any], path: str) -> None:
            accelerator.unwrap_model(models.pop()).load_state_dict(torch.load(f"{path}/unet"))

        handles = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
        accelerator.save_state(folder)
        step(accelerator, model, optimizer)
        nn.init.zeros_(whole.weight)
        accelerator.load_state(folder)
        values = [float(model.state_dict()["inner.weight"][4, 2]), float(whole.weight[0, 0])]
        if first:
            torch.save({name: value * 4 for name, value in torch.load(f"{folder}/unet").items()}, f"{folder}/unet")
        dist.barrier()
        accelerator.load_state(folder)
        values.append(float(model.state_dict()["inner.weight"][4, 2]))
        for handle in handles:
            handle.remove()
        accelerator.load_state(folder)
        values.append(float(model.state_dict()["inner.weight"][4, 2]))
        accelerator.close()
    assert seen == [(["Linear", "Saved"], [2, 2 if rank == 0 else 0]), exact if rank == 0 else shown]
    # First the saved state, with its masters and the unsharded model; then what the hook loads from another directory;
    # then the checkpoint alone.
    assert values == [exact, 3.0, 4 * shown, exact]
    names = {each.name for each in (tmp_path / "state").iterdir()}
    assert {"unet", "shardwise_0", "model.safetensors"} <= names and "model_1.safetensors" not in names


@on_ranks(RANKS)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    with launched(), quiet():
        accelerator = accelerator_of(zero(3))
        model, optimizer = made(accelerator, 1.0)

        def full(models: list[Any], weights: list[Any], path: str) -> None:
            if accelerator.is_main_process:
                raise OSError("no space")

        def fewer(models: list[Any], weights: list[dict[str, Tensor]], path: str) -> None:
            weights[0].pop("inner.bias", None)

        def others(models: list[Any], path: str) -> None:
            if not accelerator.is_main_process:
                raise ValueError("another model")

        for hook, words in (
            (full, r"rank 0 could not run the hooks of save_state[\s\S]*no space"),
            (fewer, r"changed weights of a sharded model \(one state has 1 entries now\)[\s\S]*weights\.pop\(\)"),
        ):
            handle = accelerator.register_save_state_pre_hook(hook)
            raises((RuntimeError, ValueError), words, accelerator.save_state, folder)
            handle.remove()
        accelerator.save_state(folder)
        handle = accelerator.register_load_state_pre_hook(others)
        words = "rank 1 could not run the hooks of load_state: another model"
        raises(ValueError, words, accelerator.load_state, folder)
        handle.remove()
        step(accelerator, model, optimizer)
        assert model.state_dict()["inner.weight"][0, 0] == 0.5
        accelerator.close()


RTOL = 1e-5
PLANS: dict[str, Plan] = {"ddp": replicated(), "zero1": zero(1), "zero3": zero(3)}


CLIPS: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
    "norm": lambda of, params: of.clip_grad_norm_(params, 0.05),
    "largest": lambda of, params: of.clip_grad_norm_(params, 0.01, math.inf),
    "value": lambda of, params: of.clip_grad_value_(params, 0.004),
    "a part": lambda of, params: of.clip_grad_norm_(params[1:4], 0.01),
}


def pair() -> tuple[nn.Module, nn.Module, nn.Parameter]:
    """Return two models, one feeding the other, and a parameter that belongs to neither."""
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return first, second, nn.Parameter(torch.tensor(0.5))


def train_pair(of: Any, clip: str, rank: int, ranks: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Train with ``of``: an accelerator, or ``torch.nn.utils``, whose functions have the same names."""
    first, second, factor = pair()
    steps = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (first, second)]
    steps.append(torch.optim.SGD([factor], lr=0.5))
    if ranks > 1:
        first, steps[0], second, steps[1] = of.prepare(first, steps[0], second, steps[1])
    norms = []
    for step in range(3):
        mine = points()[8 * step : 8 * step + 8][rank::ranks]
        inputs, targets = (torch.stack(each) for each in zip(*mine, strict=True))
        loss = nn.functional.mse_loss(second(first(inputs)) * factor, targets)
        of.backward(loss) if ranks > 1 else loss.backward()
        if ranks > 1:
            dist.all_reduce(factor.grad)
            factor.grad /= ranks
        found = CLIPS[clip](of, [*first.parameters(), *second.parameters(), factor])
        norms.append(0.0 if found is None else float(found))
        for each in steps:
            each.step()
            each.zero_grad()
    return [dict(first.state_dict()), dict(second.state_dict()), {"factor": factor.detach()}], norms


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize("name", [*full("ddp", "zero1"), "zero3"])
def test_parameters_of_several_models_are_clipped_together(name: str) -> None:
    with launched(), quiet():
        for clip in CLIPS:
            expected, expected_norms = train_pair(nn.utils, clip, 0, 1)
            limit = {"norm": 0.05, "largest": 0.01, "a part": 0.01}.get(clip, -1.0)
            assert min(expected_norms) > limit
            accelerator = accelerator_of(PLANS[name])
            states, norms = train_pair(accelerator, clip, dist.get_rank(), RANKS)
            accelerator.close()
            assert norms == pytest.approx(expected_norms, rel=RTOL), clip
            for state, wanted in zip(states, expected, strict=True):
                assert_close(state, wanted, RTOL, clip)


@on_ranks(1)
def test_one_rank_of_a_launcher_trains() -> None:
    """accelerate names its CPU ``cpu:0``, while a tensor's device is ``cpu``."""
    with launched():
        told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        os.environ.update(told, OMP_NUM_THREADS="1")
        accelerator = accelerator_of(zero(2))
        assert str(accelerator.device) == "cpu:0"
        model, optimizer = prepared(accelerator, 1.0)
        step(accelerator, model, optimizer)
        assert accelerator.get_state_dict(model)["weight"][0, 0] == 0.5
        accelerator.close()


@on_ranks(2)
def test_ranks_unknown_to_accelerate_are_an_error() -> None:
    with launched():
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
        words = r"has 2 ranks, but accelerate knows of 1[\s\S]*PartialState\(cpu=True\)[\s\S]*LOCAL_RANK"
        raises(RuntimeError, words, accelerator_of, zero(2))
        raises(RuntimeError, words, start, line(1.0), ds_config(1))
    close(start(line(1.0), ds_config(1)))  # accelerate's state was reset: it is not in use
