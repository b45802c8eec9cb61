"""What DeepSpeed does around a step under a loss scale: consecutive overflows, and the end at the lowest scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.deepspeed.config import Settings

__all__ = ["watched_step"]


@contextmanager
def watched_step(optimizer: Any, settings: Settings) -> Iterator[None]:
    """Around ``optimizer.step()``.

    Raises:
        RuntimeError: the step was skipped for overflow at the lowest loss scale.
    """
    scaler = optimizer.scaler
    if scaler is None:
        yield
        return
    at_floor = scaler.scale <= scaler.plan.min_scale < scaler.plan.max_scale
    yield
    if not optimizer.last_step_skipped:
        if settings["fp16.consecutive_hysteresis"]:
            scaler.overflows = 0
    elif at_floor and scaler.overflows >= scaler.plan.hysteresis:
        raise RuntimeError(
            f"{optimizer.skipped_because}, and the loss scale {scaler.scale:g} is at its minimum already - it cannot "
            "decrease any more; lower the learning rate, or train in bf16"
        )
