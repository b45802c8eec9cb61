"""Published precision and scaler arguments as plans, shared by the plugins on our engine."""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.plan import PrecisionPlan, ScalerPlan

__all__ = ["PublishedDefault", "ScalerArguments", "precision_plan", "scaler_plan"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
START_SCALE = 2.0**16


class PublishedDefault(float):
    """A default value that can be told from the same number given by the caller."""


class ScalerArguments(Protocol):
    """The arguments of the dynamic loss scale, as every plugin names them."""

    @property
    def initial_scale(self) -> float: ...
    @property
    def min_scale(self) -> float: ...
    @property
    def growth_factor(self) -> float: ...
    @property
    def backoff_factor(self) -> float: ...
    @property
    def growth_interval(self) -> int: ...
    @property
    def hysteresis(self) -> int: ...
    @property
    def max_scale(self) -> float: ...


def scaler_plan(arguments: ScalerArguments) -> ScalerPlan:
    """The loss scale. A default ``initial_scale`` above 2**16 that was left alone starts at 2**16 (within the bounds):
    from 2**32 the first 15 steps or so are certain to overflow and be skipped.

    Raises:
        ValueError: a value out of range, see :class:`~shardwise.plan.ScalerPlan`.
    """
    start = float(arguments.initial_scale)
    if isinstance(arguments.initial_scale, PublishedDefault):
        start = min(max(min(start, START_SCALE), float(arguments.min_scale)), float(arguments.max_scale))
    return ScalerPlan(
        initial_scale=start,
        min_scale=float(arguments.min_scale),
        growth_factor=float(arguments.growth_factor),
        backoff_factor=float(arguments.backoff_factor),
        growth_interval=arguments.growth_interval,
        hysteresis=arguments.hysteresis,
        max_scale=float(arguments.max_scale),
    )


def precision_plan(
    precision: str,
    arguments: ScalerArguments,
    *,
    master_weights: bool,
    reduce_dtype: torch.dtype | None = None,
    cast_inputs: bool = True,
    output_dtype: torch.dtype | None = None,
) -> PrecisionPlan:
    """Number formats for ``"fp16"``, ``"bf16"`` (parameters, buffers and inputs are cast) or ``"fp32"`` (nothing is).

    Raises:
        ValueError: another name, or a scaler value out of range.
    """
    if precision not in DTYPES:
        raise ValueError(f"precision={precision!r}: give one of {', '.join(map(repr, DTYPES))}")
    dtype = DTYPES[precision]
    return PrecisionPlan(
        param_dtype=dtype,
        buffer_dtype=dtype,
        master_weights=master_weights,
        reduce_dtype=reduce_dtype,
        accumulate_dtype=None,
        cast_inputs=cast_inputs and dtype is not None,
        output_dtype=output_dtype,
        scaler=scaler_plan(arguments) if precision == "fp16" else None,
    )
