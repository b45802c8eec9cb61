"""LowLevelZeroPlugin: ZeRO-1 and ZeRO-2 (Rajbhandari et al., arXiv 1910.02054) on our engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardwise.booster.plugin.argument_types import check_types
from shardwise.booster.plugin.base import DPPluginBase, ShardedPlugin
from shardwise.booster.plugin.engine_arguments import EngineArguments, grad_plan, precision_plan
from shardwise.compat.published import documented
from shardwise.core.base.checked import MOST_NUMEL, number, shown, whole
from shardwise.core.base.sizes import device_bytes
from shardwise.plan import ByNumel, MeshPlan, Plan, ShardPlan, on_device, usual_exchange
from shardwise.plan.loss_scale import PublishedDefault, scaler_plan

__all__ = ["LowLevelZeroArguments", "LowLevelZeroPlugin", "to_plan"]


@dataclass(frozen=True, eq=False)
class _First:
    """What is published before the loss scale's: the fields of the last base come first."""

    stage: int = 1
    precision: str = "fp16"


@documented()
@dataclass(frozen=True, eq=False)
class LowLevelZeroArguments(EngineArguments, _First):
    """The published arguments, as data.

    Attributes:
        stage: 1 shards optimizer state; 2 also shards gradients as soon as they are computed.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        initial_scale: first loss scale (fp16 only, as the six after it). Left at its default it starts at 2**16;
            2**32 given explicitly is used.
        reduce_bucket_size_in_m: elements reduced together, in units of 2**20.
        communication_dtype: gradients travel in it; ``None``: in the parameters' dtype.
        overlap_communication: reduce gradients while backward still runs.
        overlap_allgather: gather updated parameters while the next forward already runs.
        cpu_offload: masters, optimizer state and reduced gradients are on the host, and it updates them there.
        master_weights: keep fp32 copies of 16-bit parameters.
        verbose: say when a step is skipped, and why.
        cast_inputs: cast floating inputs to the parameters' dtype.
        fp8_communication: gradients and updated parameters travel in 8 bits.
        use_fp8: linear layers multiply in 8 bits, where their sizes allow it.
        extra_dp_size: number of replicas of what is sharded.
    """

    initial_scale: float = PublishedDefault(2**32)
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

    def __post_init__(self) -> None:
        check_types(LowLevelZeroArguments, self, fractions=("reduce_bucket_size_in_m",))
        scaler_plan(self)  # also where the precision is another
        to_plan(self)  # every value is checked where it is given, not at the first boost


def to_plan(arguments: LowLevelZeroArguments) -> Plan:
    """The plan that the arguments mean.

    Raises:
        ValueError: a value out of range.
    """
    if arguments.stage not in (1, 2):
        raise ValueError(f"stage={shown(arguments.stage)}: LowLevelZeroPlugin has stages 1, 2; GeminiPlugin is stage 3")
    most = MOST_NUMEL // 2**20
    size = f"a size > 0 and at most {most} (times 2**20 elements)"
    number("reduce_bucket_size_in_m", arguments.reduce_bucket_size_in_m, f"(0, {most}]", size)
    whole("extra_dp_size", arguments.extra_dp_size, 1, what="a number of replicas")
    dtype = arguments.communication_dtype
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"communication_dtype={dtype}: give a floating-point torch.dtype, or None")
    return Plan(
        mesh=MeshPlan(dp_shard=-1, dp_replicate=arguments.extra_dp_size),
        shard=ShardPlan(
            packing=ByNumel(chunk_numel=max(1, int(arguments.reduce_bucket_size_in_m * 1024 * 1024)), min_chunks=8),
            gathered_fraction=1.0,
            gathered_budget_bytes=None,
            prefetch=0,
            reduce="last" if arguments.stage == 1 else "every",
        ),
        precision=precision_plan(
            arguments.precision,
            arguments,
            master_weights=arguments.master_weights,
            reduce_dtype=arguments.communication_dtype,
            cast_inputs=arguments.cast_inputs,
        ),
        grad=grad_plan(arguments),
        comm=replace(
            usual_exchange(),
            overlap=arguments.overlap_communication,
            gather_on_use=arguments.overlap_allgather,
            compress="fp8" if arguments.fp8_communication else None,
        ),
        tiers=replace(
            on_device(),
            state_host_fraction=1.0 if arguments.cpu_offload else 0.0,
            pin_memory=arguments.cpu_offload,
            device_capacity_bytes=device_bytes(arguments.device_memory),
        ),
        verbose=arguments.verbose,
    )


class LowLevelZeroPlugin(ShardedPlugin, DPPluginBase, LowLevelZeroArguments):
    """ZeRO-1 or ZeRO-2 over all ranks; the arguments are those of :class:`LowLevelZeroArguments`."""

    def plan(self, world_size: int) -> Plan:
        return to_plan(self)

    def support_no_sync(self) -> bool:
        """Stage 1 keeps whole gradients; stage 2 has only the shard after each backward pass."""
        return self.stage == 1
