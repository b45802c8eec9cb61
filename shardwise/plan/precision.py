"""The part of a plan that is about number formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.core.base.checked import MOST_SCALE, number, require, switch, whole

__all__ = ["HALF_DTYPES", "PrecisionPlan", "ScalerPlan"]

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ScalerPlan:
    """The dynamic loss scale of fp16 (DynamicGradScaler's published arguments).

    ``growth_delay``: good steps at the beginning, and after each overflow, from which the ``growth_interval`` counts.
    """

    initial_scale: float
    min_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    max_scale: float
    growth_delay: int = 0

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "max_scale"):
            number(name, getattr(self, name), f"(0, {MOST_SCALE!r}]", f"a loss scale > 0, at most {MOST_SCALE:g}")
        require(
            self.min_scale <= self.initial_scale <= self.max_scale,
            f"initial_scale={self.initial_scale} is outside [min_scale={self.min_scale}, max_scale={self.max_scale}]",
        )
        number("growth_factor", self.growth_factor, f"(1, {MOST_SCALE!r}]", "a factor > 1 and finite")
        number("backoff_factor", self.backoff_factor, "(0, 1)", "a factor in (0, 1)")
        whole("growth_interval", self.growth_interval, 1, what="a number of steps")
        whole("hysteresis", self.hysteresis, 0, what="a number of overflows")
        whole("growth_delay", self.growth_delay, 0, what="a number of steps")


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Number formats.

    Attributes:
        param_dtype: floating parameters are cast to it for compute; ``None`` keeps each parameter's own.
        buffer_dtype: the same for floating buffers.
        master_weights: keep fp32 copies of the shards whose compute dtype is 16-bit; the optimizer updates those.
        reduce_dtype: gradients travel in it; ``None``: the parameter's compute dtype.
        accumulate_dtype: gradients are summed over backward passes in it, shards as whole ones, which travel in the
            reduce dtype all the same; ``None``: the reduce dtype.
        cast_inputs: cast floating inputs of the model to ``param_dtype`` (nested containers too).
        output_dtype: cast floating outputs; ``None`` leaves them.
        scaler: dynamic loss scale, or ``None``.
    """

    param_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    master_weights: bool
    reduce_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype | None
    cast_inputs: bool
    output_dtype: torch.dtype | None
    scaler: ScalerPlan | None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "buffer_dtype", "reduce_dtype", "accumulate_dtype", "output_dtype"):
            dtype = getattr(self, name)
            floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
            require(floating, f"{name}={dtype!r}: give a floating-point torch.dtype, or None")
        for name in ("master_weights", "cast_inputs"):
            switch(name, getattr(self, name))
