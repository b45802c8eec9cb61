"""HybridParallelPlugin: tensor and pipeline parallelism with data parallelism or ZeRO, on our engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from shardwise.booster.plugin.arguments import (
    DTYPES,
    SequenceArguments,
    bucket_numel,
    check_types,
    check_update,
    precision_plan,
    warn_unused,
    zero_parts,
)
from shardwise.booster.plugin.base import Boosted, ShardedPlugin, data_parallel_size
from shardwise.booster.plugin.hybrid_groups import RankAxes
from shardwise.core.base.validate import MOST_BYTES, integer, refuse, short_repr
from shardwise.plan import ByNumel, MeshPlan, PipelinePlan, Plan, ShardPlan, TensorPlan
from shardwise.plan.scaler_arguments import scaler_plan
from shardwise.shardformer import GradientCheckpointConfig, Policy
from shardwise.shardformer.model_optimizations import StageDivision, changed_model, kernels_of
from shardwise.shardformer.policies import PolicyArchitecture

STYLES = ("1f1b", "interleaved", "zbv")
PIPELINE = (
    "num_microbatches",
    "microbatch_size",
    "pp_style",
    "num_model_chunks",
    "num_layers_per_stage",
    "enable_metadata_cache",
    "overlap_p2p",
)
DDP = (
    "broadcast_buffers",
    "ddp_bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
)


@dataclass(frozen=True, eq=False)
class HybridParallelPlugin(ShardedPlugin, RankAxes):
    """Tensor parallelism, pipeline parallelism, and data parallelism or ZeRO over the other ranks.

    Args:
        tp_size: consecutive ranks that share the layers (tensor parallelism).
        pp_size: ranks with the stages of one model (pipeline parallelism), for ``Booster.execute_pipeline``.
        sp_size: consecutive data-parallel ranks that share sequences, for ``"all_to_all"`` and ``"ring_attn"``. Other
            modes use the ranks of ``tp_size``.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        zero_stage: 0 replicates masters and optimizer state over the data-parallel ranks; 1 shards them; 2 also shards
            gradients as soon as they are computed.
        enable_all_optimization: fused normalization and flash attention.
        enable_fused_normalization: use torch's kernel for RMS norms of transformers.
        enable_flash_attention: use torch's ``scaled_dot_product_attention`` for the model's attention, which has flash
            kernels on some devices. A model that does not support it is unchanged, with a warning.
        enable_jit_fused: no effect, with a warning: ``torch.compile`` compiles activations.
        enable_sequence_parallelism: each rank has a part of every sequence; see ``sequence_parallelism_mode``.
        sequence_parallelism_mode: ``"split_gather"``, or ``"ring"`` with the same meaning: between tensor-parallel
            layers, over the ranks of ``tp_size``. ``"all_to_all"`` (attention over full sequences for a part of the
            heads) or ``"ring_attn"`` (keys and values are sent from rank to rank): over the ranks of ``sp_size``, in
            the whole model. ``None``: ``"all_to_all"`` with ``sp_size > 1``, otherwise ``"split_gather"``.
        enable_sequence_overlap: no effect; gathers of sequences and matrix products do not overlap.
        parallel_output: logits stay sharded by vocabulary if the model's own loss allows it; the loss is the same.
        num_microbatches: micro-batches of a batch, evenly divided; fewer if the batch has fewer rows.
        microbatch_size: rows of a micro-batch (the last may be smaller), for ``num_microbatches=None``. Without either
            there is one micro-batch per stage.
        initial_scale: first loss scale (fp16 only, as the next six).
        min_scale: smallest loss scale.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale on overflow, after ``hysteresis`` overflows.
        growth_interval: number of good steps.
        hysteresis: number of overflows before the scale falls.
        max_scale: largest loss scale.
        max_norm: clip the global norm of the unscaled gradients to it; 0 is off.
        broadcast_buffers: only True: all ranks start with the buffers of rank 0. For ``zero_stage=0`` only, as the next
            five.
        ddp_bucket_cap_mb: size of gradients reduced together, in MiB.
        find_unused_parameters: no effect: a parameter without a gradient is not an error.
        check_reduction: no effect: ranks always compare the reduced parameters at the end of a pass.
        gradient_as_bucket_view: no effect: gradients are always views of the buckets.
        static_graph: no effect.
        zero_bucket_size_in_m: elements reduced together, in units of 2**20, for ``zero_stage`` 1 and 2.
        cpu_offload: keep masters, optimizer state and reduced gradients on the host, and update them there.
        communication_dtype: dtype of gradient communication; ``None``: the parameters' dtype.
        overlap_communication: reduce gradients during backward.
        custom_policy: defines the sharded layers, instead of the built-in rules for the model's classes.
        pp_style: ``"1f1b"``; ``"interleaved"`` with several stages per rank; ``"zbv"`` (zero bubble) with two, from the
            first rank to the last and back, so that the loss is on the first; gradients of weights are computed when a
            rank would wait.
        num_model_chunks: stages per rank: 1 for ``"1f1b"``, more for ``"interleaved"``, 2 for ``"zbv"``.
        num_layers_per_stage: layers of each of the ``pp_size * num_model_chunks`` stages, of which number ``s`` is on
            rank ``s % pp_size`` (``"zbv"``: the second half in the other direction); ``None``: evenly divided, with
            more in the middle.
        gradient_checkpoint_config: layers of a model of transformers that are recomputed in backward: a fraction, or a
            number for each stage.
        enable_metadata_cache: stages exchange the shapes of their activations once for each input shape, not for every
            message.
        make_vocab_size_divisible_by: the vocabulary rows of each rank are padded to a multiple of it. Files have the
            original number of rows.
        dp_outside: the stages of one model are on consecutive ranks; False: the ranks with the same stage are. No
            effect without a pipeline. Tensor-parallel ranks are always innermost.
        overlap_p2p: no effect: sends are always asynchronous.
        overlap_allgather: gather updated parameters during the next forward, for ``zero_stage`` 1 and 2.
        fp8_communication: communicate parameters, gradients and activations between layers and stages in 8 bits.
        use_fp8: linear layers multiply in 8 bits if their sizes allow it.
        inner_ring_size: ranks of an inner ring of ``"ring_attn"``; it divides ``sp_size``. ``None``: one ring of all.
        norm_type: an extension: any p > 0, including ``math.inf``.
        device_memory: an extension: device memory that may be used, in bytes or as a string such as ``"64MiB"``;
            ``None``: all of it, on a CPU no limit.
        update: an extension: ``"step"``; or ``"backward"``: update masters and optimizer state of a chunk in place as
            soon as its gradient is reduced, during backward. Gradients are not kept, and each step is one backward
            pass. Not with ``max_norm`` or ``precision="fp16"``. On a GPU this is done for chunks whose state is in host
            memory or on a disk.
        scheduler_nodes: only ``None``: ``pp_style="zbv"`` has its own schedule.

    Examples:
        >>> from shardwise.booster import Booster
        >>> from shardwise.booster.plugin import HybridParallelPlugin
        >>> plugin = HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="bf16")
        >>> booster = Booster(plugin=plugin)
    """

    tp_size: int
    pp_size: int
    sp_size: int | None = None
    precision: str = "fp16"
    zero_stage: int = 0
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    enable_sequence_overlap: bool = False
    parallel_output: bool = True
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero_bucket_size_in_m: int = 12
    cpu_offload: bool = False
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    custom_policy: Policy | None = None
    pp_style: Literal["1f1b", "interleaved", "zbv"] = "1f1b"
    num_model_chunks: int = 1
    num_layers_per_stage: list[int] | None = None
    gradient_checkpoint_config: GradientCheckpointConfig | None = None
    enable_metadata_cache: bool = True
    make_vocab_size_divisible_by: int = 64
    dp_outside: bool = True
    overlap_p2p: bool = True
    overlap_allgather: bool = False
    fp8_communication: bool = False
    use_fp8: bool = False
    inner_ring_size: int | None = None
    norm_type: float = field(default=2.0, kw_only=True)
    device_memory: int | str | None = field(default=None, kw_only=True)
    update: Literal["step", "backward"] = field(default="step", kw_only=True)
    scheduler_nodes: list[Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_types(self, fractions=("zero_bucket_size_in_m",))
        _check(self)
        scaler_plan(self)  # checked for every precision
        to_plan(self)
        warn_unused(self, _unused(self))

    def plan(self, world_size: int) -> Plan:
        """Return the plan for that many ranks.

        Raises:
            ValueError: ``tp_size``, ``pp_size`` and ``sp_size`` do not divide the ranks.
        """
        data_parallel_size(world_size, self.tp_size, self.pp_size, sequence_arguments(self).sp)
        return to_plan(self)

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Boosted:
        stages = self.pp_size * self.num_model_chunks if self.pp_size > 1 else 1
        division = StageDivision(stages, self.num_layers_per_stage if stages > 1 else None)
        with changed_model(model, kernels_of(self), self.gradient_checkpoint_config, division):
            return super().configure(model, optimizer)

    def support_no_sync(self) -> bool:
        """Return True at stages 0 and 1, which keep full gradients; stage 2 keeps only the shard after each backward
        pass.
        """
        return self.zero_stage < 2


def _check(arguments: HybridParallelPlugin) -> None:
    a = arguments
    for name in ("tp_size", "pp_size"):
        integer(name, getattr(a, name), 1, what="a number of ranks")
    if a.zero_stage not in (0, 1, 2):
        raise ValueError(
            f"zero_stage={short_repr(a.zero_stage)}: HybridParallelPlugin has stages 0, 1, 2; GeminiPlugin is stage 3"
        )
    sequence_arguments(a)
    if a.pp_style not in STYLES:
        raise ValueError(f"pp_style={a.pp_style!r}: give one of {STYLES}")
    for name in ("num_microbatches", "microbatch_size"):
        if getattr(a, name) is not None:
            integer(name, getattr(a, name), 1, what="a number, or None,")
    for name in ("num_model_chunks", "make_vocab_size_divisible_by"):
        integer(name, getattr(a, name), 1)
    if a.pp_size > 1:
        _check_pipeline(a)
    check_update(a, tp_size=a.tp_size, pp_size=a.pp_size)
    if a.scheduler_nodes is not None:
        refuse("scheduler_nodes", a.scheduler_nodes, "leave it None: pp_style='zbv' makes its own schedule")
    if a.zero_stage == 0 and not a.broadcast_buffers:
        refuse("broadcast_buffers", False, "leave it True: all ranks start with rank 0's, and keep their own from then")


def _check_pipeline(arguments: HybridParallelPlugin) -> None:
    a = arguments
    chunks = a.num_model_chunks
    if chunks < 2 if a.pp_style == "interleaved" else chunks != (1 if a.pp_style == "1f1b" else 2):
        raise ValueError(
            f"num_model_chunks={chunks} with pp_style={a.pp_style!r}: give 1 for '1f1b', 2 for 'zbv', and at least 2 "
            "for 'interleaved'"
        )
    layers, stages = a.num_layers_per_stage, a.pp_size * a.num_model_chunks
    if layers is not None:
        for index, count in enumerate(layers):
            integer(f"num_layers_per_stage[{index}]", count, 1, what="a number of layers")
        if len(layers) != stages:
            raise ValueError(
                f"num_layers_per_stage={short_repr(layers)} has {len(layers)} numbers; give one for each of the "
                f"{stages} stages (pp_size={a.pp_size} x num_model_chunks={a.num_model_chunks})"
            )


def _unused(arguments: HybridParallelPlugin) -> dict[str, Iterable[str]]:
    """Return the arguments without effect, by reason."""
    a = arguments
    unused: dict[str, Iterable[str]] = sequence_arguments(a).unused()
    if a.pp_size == 1:
        unused["there is no pipeline (pp_size=1)"] = PIPELINE
    elif a.num_microbatches is not None:
        unused["num_microbatches takes precedence"] = ("microbatch_size",)
    if a.zero_stage == 0:
        unused["for zero_stage 1 and 2 only"] = ("zero_bucket_size_in_m", "overlap_allgather")
    else:
        unused["for zero_stage=0 only"] = DDP
    if a.tp_size == 1:
        unused["for tp_size > 1 only"] = ("make_vocab_size_divisible_by", "custom_policy")
    return unused


def sequence_arguments(arguments: HybridParallelPlugin) -> SequenceArguments:
    """Return the arguments of sequence parallelism.

    Raises:
        ValueError: they contradict each other.
    """
    a = arguments
    return SequenceArguments(
        enabled=a.enable_sequence_parallelism,
        mode=a.sequence_parallelism_mode,
        overlap=a.enable_sequence_overlap,
        tp_size=a.tp_size,
        sp_size=a.sp_size,
        inner_ring_size=a.inner_ring_size,
        parallel_output=a.parallel_output,
    )


def _bucket_numel(arguments: HybridParallelPlugin) -> int:
    """Return the number of elements that are reduced together."""
    a = arguments
    if a.zero_stage == 0:
        integer("ddp_bucket_cap_mb", a.ddp_bucket_cap_mb, 1, MOST_BYTES // 2**20, "a size in MiB")
        return a.ddp_bucket_cap_mb * 2**20 // (DTYPES.get(a.precision) or torch.float32).itemsize
    return bucket_numel("zero_bucket_size_in_m", a.zero_bucket_size_in_m)


def to_plan(arguments: HybridParallelPlugin) -> Plan:
    """Translate the arguments into a plan.

    Args:
        arguments: already checked by their own constructor.

    Raises:
        ValueError: a value out of range.
    """
    a = arguments
    parts = zero_parts(a)
    if a.zero_stage == 0:
        parts["comm"] = replace(parts["comm"], gather_on_use=False)
    shard, replicate = (1, -1) if a.zero_stage == 0 else (-1, 1)
    sequence, tensor = sequence_arguments(a), TensorPlan()
    if a.tp_size > 1:
        tensor = TensorPlan(
            parallel_output=a.parallel_output,
            vocabulary_multiple=a.make_vocab_size_divisible_by,
            sequence=sequence.between_layers,
        )
        if a.custom_policy is not None:
            tensor = replace(tensor, architecture=PolicyArchitecture(a.custom_policy, tensor))
    return Plan(
        mesh=MeshPlan(
            dp_shard=shard,
            dp_replicate=replicate,
            tp=a.tp_size,
            pp=a.pp_size,
            dp_outside=a.dp_outside,
            sp=sequence.sp,
        ),
        shard=ShardPlan(
            packing=ByNumel(chunk_numel=_bucket_numel(a), min_chunks=8),
            gathered_fraction=1.0,
            reduce="every" if a.zero_stage == 2 else "last",
        ),
        precision=precision_plan(a.precision, a, master_weights=True, reduce_dtype=a.communication_dtype),
        **parts,
        verbose=a.zero_stage > 0,
        tensor=tensor,
        pipeline=_pipeline_plan(a),
        sequence=sequence.plan,
    )


def _pipeline_plan(arguments: HybridParallelPlugin) -> PipelinePlan:
    a = arguments
    if a.pp_size == 1:
        return PipelinePlan()
    return PipelinePlan(
        schedule=a.pp_style,
        chunks=a.num_model_chunks,
        microbatches=a.num_microbatches,
        microbatch_rows=a.microbatch_size if a.num_microbatches is None else None,
        layers=None if a.num_layers_per_stage is None else tuple(a.num_layers_per_stage),
        cache_shapes=a.enable_metadata_cache,
    )
