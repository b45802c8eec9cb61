"""The part of a plan about dtypes and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.core.base.validate import MOST_SCALE, check_flags, integer, number, require

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ScalerPlan:
    """The dynamic loss scale of fp16, with the arguments of ColossalAI's DynamicGradScaler.

    Attributes:
        initial_scale: the first loss scale.
        min_scale: the smallest loss scale.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps without overflow.
        backoff_factor: the scale is multiplied by it after ``hysteresis`` overflows.
        growth_interval: number of steps without overflow after which the scale grows.
        hysteresis: number of overflows after which the scale falls.
        max_scale: the largest loss scale.
        growth_delay: number of steps without overflow, at the start and after each overflow, before the steps of
            ``growth_interval`` are counted.

    Examples:
        >>> from dataclasses import replace
        >>> from shardwise.plan import zero
        >>> plan = zero(2, torch.float16)
        >>> plan = plan.but(scaler=replace(plan.precision.scaler, initial_scale=2.0**12))
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
            f"initial_scale={self.initial_scale} is outside [min_scale={self.min_scale}, max_scale={self.max_scale}]; "
            "give a scale between them",
        )
        number("growth_factor", self.growth_factor, f"(1, {MOST_SCALE!r}]", "a factor > 1 and finite")
        number("backoff_factor", self.backoff_factor, "(0, 1)", "a factor in (0, 1)")
        integer("growth_interval", self.growth_interval, 1, what="a number of steps")
        integer("hysteresis", self.hysteresis, 0, what="a number of overflows")
        integer("growth_delay", self.growth_delay, 0, what="a number of steps")


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Dtypes and the loss scale.

    Attributes:
        param_dtype: compute dtype of floating-point parameters; ``None`` keeps each parameter's dtype. Parameters of
            BatchNorm stay fp32 in a 16-bit model if its running statistics do.
        buffer_dtype: dtype of floating-point buffers except fp64 ones; ``None`` (the default) keeps their dtypes.
        master_weights: keep fp32 copies of shards whose compute dtype is 16-bit; the optimizer updates the copies.
        reduce_dtype: dtype in which gradients are reduced; ``None``: the parameter's compute dtype.
        accumulate_dtype: dtype in which gradients, sharded or full, are summed over backward passes. They are still
            reduced in the reduce dtype. ``None``: the reduce dtype.
        cast_inputs: cast floating-point inputs of the model to ``param_dtype``, also in nested containers.
        output_dtype: dtype to which floating-point outputs are cast; ``None`` does not cast.
        scaler: dynamic loss scale, or ``None``.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(2, torch.bfloat16).but(reduce_dtype=torch.float32)
    """

    param_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    master_weights: bool = True
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    cast_inputs: bool = False
    output_dtype: torch.dtype | None = None
    scaler: ScalerPlan | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "buffer_dtype", "reduce_dtype", "accumulate_dtype", "output_dtype"):
            dtype = getattr(self, name)
            floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
            require(floating, f"{name}={dtype!r}: give a floating-point torch.dtype, or None")
        check_flags(self)
