"""FairScale's published arguments as data, and the plans that they mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.checked import MOST_NUMEL, number, require, switch, whole
from shardwise.plan import ByNumel, Plan, zero
from shardwise.strategies.fully_sharded import FullyShardedArguments, to_plan
from shardwise.strategies.lightning_precision import PRECISIONS, NumberFormat

__all__ = ["NUMERIC", "FullyShardedOptions", "ShardedOptions", "plan_of_fully_sharded", "plan_of_sharded"]


@dataclass(frozen=True, kw_only=True)
class FullyShardedOptions:
    """What :class:`~shardwise.fairscale.fully_sharded.FullyShardedDataParallel` is told of how to shard."""

    reshard_after_forward: bool = True
    mixed_precision: bool = False
    fp32_reduce_scatter: bool = False
    flatten_parameters: bool = True
    move_params_to_cpu: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: int = 25
    gradient_predivide_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("mixed_precision", "fp32_reduce_scatter", "move_params_to_cpu"):
            switch(name, getattr(self, name))
        require(
            self.mixed_precision or not self.fp32_reduce_scatter,
            f"fp32_reduce_scatter={self.fp32_reduce_scatter} requires mixed_precision=True",
        )
        if self.gradient_predivide_factor is not None:
            number("gradient_predivide_factor", self.gradient_predivide_factor, "(0, inf)", "a divisor > 0")

    @property
    def format(self) -> NumberFormat:
        """Number formats. The loss scale is the program's own, a ``ShardedGradScaler``."""
        if not self.mixed_precision:
            return PRECISIONS["32-true"]
        return replace(PRECISIONS["16-mixed"], dtype=self.compute_dtype or torch.float16, scaled=False)


NUMERIC = (
    "mixed_precision",
    "fp32_reduce_scatter",
    "move_params_to_cpu",
    "compute_dtype",
    "buffer_dtype",
    "move_grads_to_cpu",
    "gradient_predivide_factor",
)
"""Of nested wrappers all have to be told the same of these; the others are about memory and speed, the root's count."""


def plan_of_fully_sharded(options: FullyShardedOptions, units: tuple[str, ...]) -> Plan:
    """The plan that the options of the outermost wrapper mean.

    Args:
        options: checked by their constructor.
        units: names of the wrapped modules inside.
    """
    a = options
    plan = to_plan(
        FullyShardedArguments(
            cpu_offload=a.move_params_to_cpu,
            flatten_parameters=a.flatten_parameters,
            reshard_after_forward=a.reshard_after_forward,
            move_grads_to_cpu=a.move_grads_to_cpu,
            fp32_reduce_scatter=a.fp32_reduce_scatter or None,
            compute_dtype=None if a.mixed_precision else a.compute_dtype,
            bucket_cap_mb=a.bucket_cap_mb,
        ),
        a.format,
        units,
    )
    changes: dict[str, Any] = {}
    if a.buffer_dtype is not None:
        changes["buffer_dtype"] = a.buffer_dtype
    if a.gradient_predivide_factor is not None:
        changes["predivide"] = float(a.gradient_predivide_factor)
    return plan.but(**changes)


@dataclass(frozen=True, kw_only=True)
class ShardedOptions:
    """What :class:`~shardwise.fairscale.sharded_ddp.ShardedDataParallel` is told of how to reduce."""

    sync_models_at_startup: bool = True
    reduce_buffer_size: int = 2**23
    reduce_fp16: bool = False

    def __post_init__(self) -> None:
        whole("reduce_buffer_size", self.reduce_buffer_size, 0, MOST_NUMEL, "elements (0: each parameter by itself),")
        for name in ("sync_models_at_startup", "reduce_fp16"):
            switch(name, getattr(self, name))


def plan_of_sharded(options: ShardedOptions) -> Plan:
    """Parameters stay whole, gradients and optimizer state are sharded."""
    return zero(2).but(
        packing=ByNumel(chunk_numel=max(options.reduce_buffer_size, 1), min_chunks=8),
        master_weights=False,
        reduce_dtype=torch.float16 if options.reduce_fp16 else None,
        accumulate_dtype=torch.float32 if options.reduce_fp16 else None,
        sync_init=options.sync_models_at_startup,
    )
