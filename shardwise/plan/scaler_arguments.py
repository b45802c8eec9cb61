"""Published arguments of the dynamic loss scale -> ScalerPlan, for all front-ends that have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.core.base.validate import integer, number
from shardwise.plan.precision import ScalerPlan

START_SCALE = 2.0**16


class PublishedDefault(float):
    """A default value that can be told apart from the same number given by the caller."""


@dataclass(frozen=True, eq=False)
class ScalerArguments:
    """The arguments of the dynamic loss scale, with the names, order and usual defaults of the published interfaces.

    Attributes:
        initial_scale: first loss scale (fp16 only, like all others here).
        min_scale: the scale never falls below it.
        growth_factor: the scale is multiplied by it after ``growth_interval`` good steps.
        backoff_factor: the scale is multiplied by it on overflow, once ``hysteresis`` overflows were seen.
        growth_interval: number of steps without overflow after which the scale grows.
        hysteresis: number of overflows tolerated before the scale falls.
        max_scale: the scale never rises above it.
    """

    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32


def scaler_plan(arguments: Any) -> ScalerPlan:
    """Return the loss scale of an object with the fields of :class:`ScalerArguments`.

    A default ``initial_scale`` above 2**16 that was not given starts at 2**16 (within the bounds): from 2**32 the first
    15 steps or so are certain to overflow and be skipped.

    Raises:
        TypeError, ValueError: a value is not a number, or out of range; see :class:`~shardwise.plan.ScalerPlan`.
    """
    for name in ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "max_scale"):
        number(name, getattr(arguments, name), "(-inf, inf)")  # types; the plan checks the ranges
    start = float(arguments.initial_scale)
    if isinstance(arguments.initial_scale, PublishedDefault):
        start = min(max(min(start, START_SCALE), float(arguments.min_scale)), float(arguments.max_scale))
    return ScalerPlan(
        initial_scale=start,
        min_scale=float(arguments.min_scale),
        growth_factor=float(arguments.growth_factor),
        backoff_factor=float(arguments.backoff_factor),
        growth_interval=integer("growth_interval", arguments.growth_interval, 1, what="a number of steps", floats=True),
        hysteresis=integer("hysteresis", arguments.hysteresis, 0, what="a number of overflows", floats=True),
        max_scale=float(arguments.max_scale),
    )


TORCH_SCALER = scaler_plan(ScalerArguments(min_scale=2.0**-24, growth_interval=2000, hysteresis=1, max_scale=2.0**64))
"""The defaults of ``torch.amp.GradScaler``."""
