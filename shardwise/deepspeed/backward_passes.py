"""Passes and steps as in DeepSpeed: which losses are scaled, ``no_sync()``, and errors at the lowest loss scale."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from shardwise.deepspeed.config import AssertedError, Settings
from shardwise.session import Session


class NoSyncError(AssertedError):
    """``no_sync()`` at a stage without it, or a call that is not allowed inside."""


class PassesApart:
    """The engine's ``no_sync()`` and ``coalesce_grad_reduction()``: one block at a time, without steps inside.

    Args:
        session: the engine's session.
        stage: the ZeRO stage.
    """

    _inside: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()

    def __init__(self, session: Session, stage: int) -> None:
        self._session, self._stage, self._open = session, stage, ""

    @classmethod
    def has(cls, session: Session) -> bool:
        """Return whether the program is in ``no_sync()`` of ``session``, where gradients are local."""
        return session in cls._inside

    def check_step(self) -> None:
        """Check that the program is not in a block.

        Raises:
            NoSyncError: the program is in a block.
        """
        if self._open:
            raise NoSyncError(
                f"It is illegal to call Engine.step() inside no_sync context manager: leave {self._open}() first"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run ``session.no_sync()``.

        Raises:
            NoSyncError: stages 2 and 3 keep no unsharded gradients; or the program is already in a block.
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
        """Reduce the gradients of passes together at the end if the plan keeps unsharded gradients. Collective.

        Raises:
            NoSyncError: the program is already in a block.
        """
        if self._open:
            raise NoSyncError(
                f"coalesce_grad_reduction() inside {self._open}() is not allowed: leave {self._open}() first"
            )
        unsharded = self._session.plan.shard.reduce == "last"
        with self._entered("coalesce_grad_reduction"), self._session.no_sync() if unsharded else nullcontext():
            yield
        self._session.passes.reduce_unreduced()

    @contextmanager
    def _entered(self, name: str) -> Iterator[None]:
        self._open = name
        try:
            yield
        finally:
            self._open = ""


def take_passes_of_module(session: Session) -> None:
    """Treat ``loss.backward()`` of outputs of ``engine.module`` as unscaled, as in DeepSpeed."""
    passes = session.passes
    passes.takes_unscaled = True
    session.events.backward_ended.listen(partial(setattr, passes, "takes_unscaled", True))


def drop_after_passes(session: Session, settings: Settings) -> None:
    """Free prefetched parameters after each backward pass if the limits of stage 3 are 0."""
    limits = [settings[f"zero_optimization.stage3_{name}"] for name in ("max_live_parameters", "max_reuse_distance")]
    if settings.stage == 3 and min(limits) == 0:
        session.events.backward_ended.listen(partial(session.drop_gathered, to_system=False))


def scaled_passes(session: Session) -> None:
    """Expect a scaled loss, because the engine itself was called."""
    if torch.is_grad_enabled():
        session.passes.takes_unscaled = False


@contextmanager
def watched_step(optimizer: Any, settings: Settings) -> Iterator[None]:
    """Return a context around ``optimizer.step()`` that checks its loss scale.

    Raises:
        RuntimeError: the step was skipped for overflow at the lowest loss scale. As in DeepSpeed, not at stage 0 and
            not if ``optimizer.loss_scaler.raise_error_at_min_scale`` is false.
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
            f"{optimizer.skipped_because}, and the loss scale {scaler.scale:g} is already at its minimum and cannot "
            "decrease any more. Lower the learning rate, or train in bf16"
        )
