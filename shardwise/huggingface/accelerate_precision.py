"""``mixed_precision`` of accelerate as the number formats of a plan."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.plan import Plan, zero

__all__ = ["with_precision"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def with_precision(plan: Plan, mixed_precision: str | None) -> Plan:
    """``plan`` with 16-bit parameters, gradients and inputs, fp32 masters and fp32 outputs.

    Buffers keep their dtypes. fp16 has a dynamic loss scale. A plan that is in these numbers already is left alone.

    Raises:
        ValueError: the plan has another parameter dtype.
        NotImplementedError: another format (fp8).
    """
    if mixed_precision in (None, "no"):
        return plan
    dtype = DTYPES.get(str(mixed_precision))
    if dtype is None:
        raise NotImplementedError(f"mixed_precision={mixed_precision!r} is not available: use 'bf16', 'fp16' or 'no'")
    given = plan.precision.param_dtype
    if given is not None and given != dtype:
        raise ValueError(f"mixed_precision={mixed_precision!r} with a plan of {given}: give one of them")
    if given == dtype:
        return plan
    formats = replace(zero(1, dtype).precision, buffer_dtype=None, output_dtype=torch.float32)
    return replace(plan, precision=replace(formats, reduce_dtype=plan.precision.reduce_dtype))
