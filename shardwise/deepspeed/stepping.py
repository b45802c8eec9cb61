"""What DeepSpeed does around passes and steps under a loss scale: whose losses need it, consecutive overflows, its end.

And what it raises where passes cannot be left unreduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from shardwise.deepspeed.config import AssertedError, Settings
from shardwise.session import Session

__all__ = [
    "NoSyncError",
    "PassesApart",
    "drop_after_passes",
    "scaled_passes",
    "take_passes_of_module",
    "watched_step",
]


class NoSyncError(AssertedError):
    """``no_sync()`` at a stage that has none, or what may not be in it."""


class PassesApart:
    """Blocks of passes that exchange nothing, one at a time; no step is made in one.

    Args:
        session: of the engine.
        stage: of the configuration.
    """

    _inside: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()

    def __init__(self, session: Session, stage: int) -> None:
        self._session, self._stage, self._open = session, stage, ""

    @classmethod
    def has(cls, session: Session) -> bool:
        """Whether the program is in such a block of ``session``, where gradients are this rank's own."""
        return session in cls._inside

    def check_step(self) -> None:
        """Raises:
        NoSyncError: a step inside of a block.
        """
        if self._open:
            raise NoSyncError(
                f"It is illegal to call Engine.step() inside no_sync context manager: leave {self._open}() first"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """``session.no_sync()``.

        Raises:
            NoSyncError: stages 2 and 3 keep no whole gradients; or the program is in a block already.
        """
        try:
            block = self._session.no_sync()
        except ValueError as error:
            raise NoSyncError(
                "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
                f"{self._stage}: {error}"
            ) from error
        if self._open:
            raise NoSyncError(f"no_sync context manager reentry is unsupported: leave {self._open}() first")
        with self._entered("no_sync"), block:
            self._inside.add(self._session)
            try:
                yield
            finally:
                self._inside.discard(self._session)

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Passes whose gradients are reduced together at its end, where whole ones are kept. Collective.

        Raises:
            NoSyncError: the program is in a block already.
        """
        if self._open:
            raise NoSyncError(
                f"coalesce_grad_reduction() nested in a block that exchanges nothing: leave {self._open}() first"
            )
        kept = self._session.plan.shard.reduce == "last"
        with self._entered("coalesce_grad_reduction"), self._session.no_sync() if kept else nullcontext():
            yield
        self._session.reduce_rest()

    @contextmanager
    def _entered(self, name: str) -> Iterator[None]:
        self._open = name
        try:
            yield
        finally:
            self._open = ""


def take_passes_of_module(session: Session) -> None:
    """``loss.backward()`` of what ``engine.module`` returned is taken unscaled, as under DeepSpeed: one loss of several
    engines has no scale of its own."""
    session.take_unscaled(True)
    session.events.backward_ended.listen(partial(session.take_unscaled, True))


def drop_after_passes(session: Session, settings: Settings) -> None:
    """Where no parameter may stay gathered, none does behind a backward pass, be it fetched ahead."""
    limits = [settings[f"zero_optimization.stage3_{name}"] for name in ("max_live_parameters", "max_reuse_distance")]
    if settings.stage == 3 and min(limits) == 0:
        session.events.backward_ended.listen(partial(session.drop_gathered, to_system=False))


def scaled_passes(session: Session) -> None:
    """The engine itself is called: a loss of what it returns has to be scaled."""
    if torch.is_grad_enabled():
        session.take_unscaled(False)


@contextmanager
def watched_step(optimizer: Any, settings: Settings) -> Iterator[None]:
    """Around ``optimizer.step()``.

    Raises:
        RuntimeError: the step was skipped for overflow at the lowest loss scale; not at stage 0, and not where
            ``optimizer.loss_scaler.raise_error_at_min_scale`` was set to false, as under DeepSpeed.
    """
    scaler = optimizer.scaler
    if scaler is None:
        yield
        return
    at_floor = scaler.scale <= scaler.plan.min_scale < scaler.plan.max_scale
    raises = settings.stage > 0 and getattr(getattr(optimizer, "loss_scaler", None), "raise_error_at_min_scale", True)
    yield
    if not optimizer.last_step_skipped:
        if settings["fp16.consecutive_hysteresis"]:
            scaler.forget_overflows()
    elif raises and at_floor and scaler.overflows >= scaler.plan.hysteresis:
        raise RuntimeError(
            f"{optimizer.skipped_because}, and the loss scale {scaler.scale:g} is at its minimum already - it cannot "
            "decrease any more; lower the learning rate, or train in bf16"
        )
