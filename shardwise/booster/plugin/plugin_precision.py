"""The published precision as a plan, shared by the plugins on our engine."""

from __future__ import annotations

import torch

from shardwise.loss_scale import ScalerArguments, scaler_plan
from shardwise.plan import PrecisionPlan

__all__ = ["precision_plan"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}


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
