"""LowLevelZeroPlugin: ZeRO-1 and ZeRO-2 (Rajbhandari et al., arXiv 1910.02054) on our engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from shardwise.booster.plugin.arguments import bucket_numel, check_types, precision_plan, zero_parts
from shardwise.booster.plugin.base import DPPluginBase, ShardedPlugin
from shardwise.core.base.validate import integer, short_repr
from shardwise.plan import ByNumel, MeshPlan, Plan, ShardPlan
from shardwise.plan.scaler_arguments import PublishedDefault, scaler_plan


@dataclass(frozen=True, eq=False)
class LowLevelZeroPlugin(ShardedPlugin, DPPluginBase):
    """ZeRO-1 or ZeRO-2 over all ranks.

    Args:
        stage: 1 shards optimizer state; 2 also shards gradients as soon as they are computed.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        initial_scale: first loss scale (fp16 only, as the next six). The default means 2**16; an explicit 2**32 is
            used.
        min_scale: smallest loss scale.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale on overflow, after ``hysteresis`` overflows.
        growth_interval: number of good steps.
        hysteresis: number of overflows before the scale falls.
        max_scale: largest loss scale.
        max_norm: clip the global norm of the unscaled gradients to it; 0 is off.
        norm_type: any p > 0, including ``math.inf``.
        reduce_bucket_size_in_m: elements reduced together, in units of 2**20.
        communication_dtype: dtype of gradient communication; ``None``: the parameters' dtype.
        overlap_communication: reduce gradients during backward.
        overlap_allgather: gather updated parameters during the next forward.
        cpu_offload: keep masters, optimizer state and reduced gradients on the host, and update them there.
        master_weights: keep fp32 copies of 16-bit parameters.
        verbose: report skipped steps with the reason.
        cast_inputs: cast floating-point inputs to the parameters' dtype.
        fp8_communication: communicate gradients and updated parameters in 8 bits.
        use_fp8: linear layers multiply in 8 bits if their sizes allow it.
        extra_dp_size: number of replicas of the sharded state.
        device_memory: an extension: device memory that may be used, in bytes or as a string such as ``"64MiB"``;
            ``None``: all of it, on a CPU no limit.
        update: an extension: ``"step"``; or ``"backward"``: update masters and optimizer state of a chunk in place as
            soon as its gradient is reduced, during backward. Gradients are not kept, and each step is one backward
            pass. Not with ``max_norm`` or ``precision="fp16"``. On a GPU this is done for chunks whose state is in host
            memory or on a disk.

    Examples:
        >>> from shardwise.booster import Booster
        >>> from shardwise.booster.plugin import LowLevelZeroPlugin
        >>> plugin = LowLevelZeroPlugin(stage=2, precision="bf16", max_norm=1.0)
        >>> booster = Booster(plugin=plugin)
    """

    stage: int = 1
    precision: str = "fp16"
    initial_scale: float = PublishedDefault(2**32)
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: int = 12
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = False
    cast_inputs: bool = True
    fp8_communication: bool = False
    use_fp8: bool = False
    extra_dp_size: int = 1
    device_memory: int | str | None = field(default=None, kw_only=True)
    update: Literal["step", "backward"] = field(default="step", kw_only=True)

    def __post_init__(self) -> None:
        check_types(self, fractions=("reduce_bucket_size_in_m",))
        scaler_plan(self)  # checked for every precision
        to_plan(self)  # raises errors now, not at the first boost

    def plan(self, world_size: int) -> Plan:
        return to_plan(self)

    def support_no_sync(self) -> bool:
        """Return True at stage 1, which keeps full gradients; stage 2 keeps only the shard after each backward pass."""
        return self.stage == 1


def to_plan(arguments: LowLevelZeroPlugin) -> Plan:
    """Translate the arguments into a plan.

    Raises:
        ValueError: a value out of range.
    """
    a = arguments
    if a.stage not in (1, 2):
        raise ValueError(f"stage={short_repr(a.stage)}: LowLevelZeroPlugin has stages 1, 2; GeminiPlugin is stage 3")
    integer("extra_dp_size", a.extra_dp_size, 1, what="a number of replicas")
    parts = zero_parts(a)  # first, since its errors have the names of the arguments
    return Plan(
        mesh=MeshPlan(dp_shard=-1, dp_replicate=a.extra_dp_size),
        shard=ShardPlan(
            packing=ByNumel(
                chunk_numel=bucket_numel("reduce_bucket_size_in_m", a.reduce_bucket_size_in_m), min_chunks=8
            ),
            gathered_fraction=1.0,
            reduce="last" if a.stage == 1 else "every",
        ),
        precision=precision_plan(
            a.precision,
            a,
            master_weights=a.master_weights,
            reduce_dtype=a.communication_dtype,
            cast_inputs=a.cast_inputs,
        ),
        **parts,
        verbose=a.verbose,
    )
