"""Published arguments of the dynamic loss scale as a plan, for every interface that has them."""

from __future__ import annotations

from typing import Protocol

from shardwise.checked import number, whole
from shardwise.plan import ScalerPlan

__all__ = ["PublishedDefault", "ScalerArguments", "scaler_plan"]

START_SCALE = 2.0**16


class PublishedDefault(float):
    """A default value that can be told from the same number given by the caller."""


class ScalerArguments(Protocol):
    """The arguments of the dynamic loss scale, as every published interface names them."""

    @property
    def initial_scale(self) -> float: ...
    @property
    def min_scale(self) -> float: ...
    @property
    def growth_factor(self) -> float: ...
    @property
    def backoff_factor(self) -> float: ...
    @property
    def growth_interval(self) -> float: ...
    @property
    def hysteresis(self) -> float: ...
    @property
    def max_scale(self) -> float: ...


def scaler_plan(arguments: ScalerArguments) -> ScalerPlan:
    """The loss scale. A default ``initial_scale`` above 2**16 that was left alone starts at 2**16 (within the bounds):
    from 2**32 the first 15 steps or so are certain to overflow and be skipped.

    Raises:
        TypeError, ValueError: no number, or one out of range, see :class:`~shardwise.plan.ScalerPlan`.
    """
    for name in ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "max_scale"):
        number(name, getattr(arguments, name), "(-inf, inf)")  # kinds; the plan has the ranges
    start = float(arguments.initial_scale)
    if isinstance(arguments.initial_scale, PublishedDefault):
        start = min(max(min(start, START_SCALE), float(arguments.min_scale)), float(arguments.max_scale))
    return ScalerPlan(
        initial_scale=start,
        min_scale=float(arguments.min_scale),
        growth_factor=float(arguments.growth_factor),
        backoff_factor=float(arguments.backoff_factor),
        growth_interval=whole("growth_interval", arguments.growth_interval, 1, what="a number of steps", floats=True),
        hysteresis=whole("hysteresis", arguments.hysteresis, 0, what="a number of overflows", floats=True),
        max_scale=float(arguments.max_scale),
    )
