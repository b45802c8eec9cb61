"""What DeepSpeed does around passes and steps under a loss scale: whose losses need it, consecutive overflows, its end.

And what it raises where passes cannot be left unreduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from shardwise.build import Session
from shardwise.deepspeed.config import Settings

__all__ = ["NoSyncError", "scaled_passes", "take_passes_of_module", "unreduced", "watched_step"]


class NoSyncError(ValueError, AssertionError):
    """``no_sync()`` at a stage that has none. (DeepSpeed asserts it, and programs catch that.)"""


def unreduced(session: Session, stage: int) -> AbstractContextManager[None]:
    """``session.no_sync()``.

    Raises:
        NoSyncError: stages 2 and 3 keep no whole gradients.
    """
    try:
        return session.no_sync()
    except ValueError as error:
        raise NoSyncError(
            f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}: {error}"
        ) from error


def take_passes_of_module(session: Session) -> None:
    """``loss.backward()`` of what ``engine.module`` returned is taken unscaled, as under DeepSpeed: one loss of several
    engines has no scale of its own."""
    session.take_unscaled(True)
    session.events.backward_ended.listen(partial(session.take_unscaled, True))


def scaled_passes(session: Session) -> None:
    """The engine itself is called: a loss of what it returns has to be scaled."""
    if torch.is_grad_enabled():
        session.take_unscaled(False)


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
