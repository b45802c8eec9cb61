"""The loss scale of an engine moves as DeepSpeed's does, and is read under the names of DeepSpeed's objects."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from sets import full
from shardwise.deepspeed.utils import safe_set_full_grad
from torch import nn

import shardwise.deepspeed as deepspeed


def engine_of(stage: int, **half: Any) -> Any:
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage},
        **half,
    }
    return deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]


def steps(engine: Any, values: list[float]) -> list[float]:
    """The scale after each of some steps, with gradients of these values."""
    found = []
    for value in values:
        engine.backward(engine(torch.ones(1, 2, dtype=torch.float16)).float().sum())
        for param in engine.module.parameters():
            safe_set_full_grad(param, torch.full_like(param, value))
        engine.step()
        found.append(engine.optimizer.loss_scaler.cur_scale)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_doubles_in_the_step_after_a_window(stage: int) -> None:
    engine = engine_of(stage, fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1})
    scaler = engine.optimizer.loss_scaler
    assert (scaler.loss_scale, scaler.scale_window, scaler.scale_factor, scaler.dynamic) == (256.0, 2, 2.0, True)
    assert (scaler.min_scale, scaler.delayed_shift, scaler.consecutive_hysteresis) == (1.0, 1, False)
    assert hasattr(engine.optimizer, "loss_scale_config") == (stage == 0)
    assert steps(engine, [0.1] * 5) == [256.0, 256.0, 512.0, 512.0, 1024.0]
    assert steps(engine, [float("inf"), 0.1, float("nan"), 0.1, 0.1, 0.1]) == [512.0, 512.0, 256.0, 256.0, 256.0, 512.0]
    assert scaler.cur_iter == engine.global_steps == 11 and engine.skipped_steps == 2
    engine.destroy()


def test_at_stage_0_every_overflow_counts_and_the_lowest_scale_is_no_error() -> None:
    half = {"enabled": True, "initial_scale_power": 2, "hysteresis": 3, "loss_scale_window": 2}
    engine = engine_of(0, fp16=half)
    assert "every overflow" in engine.report.ignored["fp16.hysteresis"]
    assert steps(engine, [float("inf")] * 4 + [0.1] * 3) == [2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    assert engine.skipped_steps == 4
    engine.destroy()
    engine = engine_of(1, fp16=half)
    assert steps(engine, [float("inf")] * 4) == [4.0, 4.0, 2.0, 1.0]
    with pytest.raises(RuntimeError, match="at its minimum already"):
        steps(engine, [float("inf")])
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    assert engine.optimizer.loss_scaler.raise_error_at_min_scale
    engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # as DeepSpeed's has it
    assert steps(engine, [float("inf")] * 2) == [1.0, 1.0] and engine.skipped_steps == 7
    assert all(map(torch.equal, engine.module_state_dict().values(), before.values()))
    engine.destroy()


def test_overflows_that_are_left() -> None:
    engine = engine_of(1, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 3})
    scaler = engine.optimizer.loss_scaler
    left = [scaler.cur_hysteresis]
    for _ in range(4):
        steps(engine, [float("inf")])
        left.append(scaler.cur_hysteresis)
    assert left == [3, 2, 1, 1, 1] and scaler.loss_scale == 64.0
    engine.destroy()


STATIC = {"fp16": {"enabled": True, "loss_scale": 138.0}}


@pytest.mark.parametrize(("half", "scale"), [(STATIC, 138.0), *full(({}, 1.0))])
def test_a_scale_that_stays(half: dict[str, Any], scale: float) -> None:
    engine = engine_of(2, **half)
    scaler = engine.optimizer.loss_scaler
    assert (scaler.loss_scale, scaler.cur_scale, scaler.dynamic) == (scale, scale, False)
    assert engine.optimizer.needs_scaler() == (scale != 1.0)
    engine.destroy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del engine
        gc.collect()
    with pytest.raises(RuntimeError, match=r"read optimizer\.loss_scale"):
        _ = scaler.loss_scale


@pytest.mark.parametrize("more", [{"enabled": True, "loss_scale": 128}, {"enabled": False}, {}])
@pytest.mark.parametrize(("key", "value"), [("loss_scale_window", 0), ("min_loss_scale", -1)])
def test_what_only_a_dynamic_scale_uses_counts_with_one(more: dict[str, Any], key: str, value: int) -> None:
    found, report = deepspeed.to_plan({"fp16": {key: value, **more}}, 4)
    assert found == deepspeed.to_plan({"fp16": more}, 4)[0] and f"fp16.{key}" in report.ignored
    with pytest.raises(ValueError, match=f"{key}={value}.* with a dynamic loss scale: give a"):
        deepspeed.to_plan({"fp16": {"enabled": True, key: value}}, 4)
