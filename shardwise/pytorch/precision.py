"""Number formats of torch's policies as those of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.core.base.checked import refuse
from shardwise.plan import Plan, ScalerPlan
from shardwise.plan.precision import HALF_DTYPES

__all__ = ["TORCH_SCALER", "check_full_precision", "with_formats"]

TORCH_SCALER = ScalerPlan(
    initial_scale=2.0**16,
    min_scale=2.0**-24,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    hysteresis=1,
    max_scale=2.0**64,
)
"""What torch's ``GradScaler`` does."""


def with_formats(plan: Plan, policy: Any) -> Plan:
    """``plan`` in the numbers of a ``MixedPrecision`` or ``MixedPrecisionPolicy``: parameters are computed with in
    ``param_dtype`` and updated as they are; fp16 has the loss scale of torch's ``GradScaler``.

    Raises:
        NotImplementedError: ``keep_low_precision_grads``.
    """
    if getattr(policy, "keep_low_precision_grads", False):
        refuse("mixed_precision.keep_low_precision_grads", True, "the optimizer gets gradients in fp32; leave it False")
    dtype = policy.param_dtype
    root = getattr(policy, "cast_root_forward_inputs", False)
    cast = bool(getattr(policy, "cast_forward_inputs", True) or root)
    precision = replace(
        plan.precision,
        param_dtype=dtype,
        buffer_dtype=getattr(policy, "buffer_dtype", None),
        reduce_dtype=policy.reduce_dtype,
        accumulate_dtype=torch.float32 if {dtype, policy.reduce_dtype} & set(HALF_DTYPES) else None,
        cast_inputs=cast and dtype is not None,
        output_dtype=getattr(policy, "output_dtype", None),
        scaler=TORCH_SCALER if dtype is torch.float16 else None,
    )
    return replace(plan, precision=precision)


def check_full_precision(model: nn.Module, policy: Any) -> None:
    """Raises:
    NotImplementedError: the policy leaves modules of some classes in fp32, and the model has one.
    """
    classes = tuple(getattr(policy, "_module_classes_to_ignore", ()) or ())
    found = next((name for name, module in model.named_modules() if classes and isinstance(module, classes)), None)
    if policy.param_dtype is not None and found is not None:
        refuse(
            "mixed_precision.param_dtype",
            policy.param_dtype,
            f"{found} ({type(model.get_submodule(found)).__name__}) would be computed in fp32 by torch: use a norm "
            "without running statistics, or fp32",
        )
