"""Arguments that both plugins on our engine have, and what they mean in a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from shardwise.core.base.checked import refuse
from shardwise.plan import GradPlan, PrecisionPlan
from shardwise.plan.loss_scale import ScalerArguments, scaler_plan

__all__ = ["EngineArguments", "check_update", "grad_plan", "precision_plan"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}


@dataclass(frozen=True, eq=False)
class EngineArguments(ScalerArguments):
    """The loss scale's, clipping's behind them, and ours, which are given by name.

    Attributes:
        max_norm: clip the global norm of the unscaled gradients to it; 0 is off.
        norm_type: any p > 0, ``math.inf`` included.
        device_memory: an extension: memory of the device that may be used, in bytes or as a text such as ``"64MiB"``;
            ``None``: what it has, on a CPU no limit.
        update: an extension: ``"step"``; or ``"backward"``: masters and optimizer state of a chunk are updated as soon
            as its gradient is reduced, beside the rest of backward, in place: gradients are not kept, and each step is
            one backward pass. Not with ``max_norm`` or ``precision="fp16"``. On a GPU it is done for what is at home on
            the host or a disk.
    """

    max_norm: float = 0.0
    norm_type: float = 2.0
    device_memory: int | str | None = field(default=None, kw_only=True)
    update: Literal["step", "backward"] = field(default="step", kw_only=True)


def check_update(arguments: EngineArguments, **sizes: int) -> None:
    """Raises:
    NotImplementedError: updates during backward, of a model that ranks hold together (one of ``sizes`` above 1).
    """
    parts = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if parts and arguments.update == "backward":
        refuse("update", arguments.update, f"use update='step' with {', '.join(parts)}")


def grad_plan(arguments: EngineArguments) -> GradPlan:
    """Raises:
    ValueError: clipping or the moment of the update out of range.
    """
    a = arguments
    return GradPlan(max_norm=a.max_norm, norm_type=a.norm_type, average="sum", update=a.update)


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
