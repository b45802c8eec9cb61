"""GeminiPlugin: ZeRO-3 in chunks whose size is searched. Any fraction of the chunks may stay gathered."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardwise.booster.plugin.arguments import (
    SequenceArguments,
    check_types,
    check_update,
    fits,
    precision_plan,
    warn_unused,
)
from shardwise.booster.plugin.base import Boosted, DPPluginBase, ShardedPlugin, data_parallel_size
from shardwise.core.base.sizes import device_bytes
from shardwise.core.base.validate import MOST_NUMEL, fraction, integer, number, refuse
from shardwise.core.memory.trace.stats import MemStats
from shardwise.plan import (
    MOST_SEARCHED,
    AutoPlan,
    ByNumel,
    BySearch,
    CommPlan,
    GradPlan,
    MeshPlan,
    Packing,
    Plan,
    ShardPlan,
    TensorPlan,
    TierPlan,
)
from shardwise.plan.scaler_arguments import scaler_plan
from shardwise.shardformer.model_optimizations import changed_model, kernels_of

DEFAULT_HIDDEN_DIM = 1024
STATIC_FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
AUTO_RATIOS = ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio")
OLD_POLICIES = {
    "cuda": "'cuda' is now 'static' as it is",
    "cpu": "'cpu' is now 'static' with offload_optim_frac=1.0, offload_param_frac=1.0",
}


@dataclass(frozen=True, eq=False)
class GeminiPlugin(ShardedPlugin, DPPluginBase):
    """ZeRO-3 in chunks, and all modes between ZeRO-3 and ZeRO-2.

    Args:
        chunk_config_dict: ``{shard ranks: {"chunk_size": elements, "keep_gathered": bool}}`` instead of the search.
            It is only read, so one dict may be used for any number of models.
        chunk_init_device: ``None`` or a device where the placement keeps chunks: they are allocated there. The CPU is
            an error in a run that keeps all parameters on GPUs.
        placement_policy: ``"static"``: by the three fractions below. ``"auto"``: everything starts on the host; the
            first step is traced, and later steps keep as much on the device as its memory allows at each moment.
        enable_gradient_accumulation: no effect: backward passes before a step always accumulate. True is an error with
            ``update="backward"``, where each step is one backward pass.
        max_prefetch: chunks gathered ahead of their use, once the order is known. No effect if no chunk is gathered
            (``shard_param_frac=0.0``) or with ``enable_async_reduce=False``.
        shard_param_frac: fraction of the parameters that is released between uses: 1.0 is ZeRO-3, 0.0 is ZeRO-2. For
            ``"static"`` only, as the next two.
        offload_optim_frac: fraction of masters, optimizer state and reduced gradients on the host.
        offload_param_frac: fraction of parameters that is on the host between uses, and therefore not gathered for any
            ``shard_param_frac``. It can be combined with every ``offload_optim_frac``.
        warmup_non_model_data_ratio: with ``"auto"``, the fraction of the device's memory that the first step keeps free
            of model data.
        steady_cuda_cap_ratio: with ``"auto"``, the fraction of the device's memory that later steps may use.
        precision: ``"fp16"``, ``"bf16"`` or (an extension) ``"fp32"``.
        master_weights: keep fp32 copies of 16-bit parameters.
        pin_memory: pinned host memory for offloaded state; ``enable_async_reduce`` implies it.
        force_outputs_fp32: cast floating-point outputs of the model to fp32.
        strict_ddp_mode: refuse every parallelism except data parallelism.
        search_range_m: chunk sizes are searched over this many units of 2**20 elements.
        hidden_dim: step of the search in elements; ``None``: 1024.
        min_chunk_size_m: smallest chunk, in units of 2**20 elements.
        memstats: with ``"auto"``, the trace of an earlier run, or the result of ``trace_memory`` for the model (a
            ``MemStats``, or the path of a saved one), instead of a traced first step.
        gpu_margin_mem_ratio: with ``"auto"``, the fraction of the free device memory that optimizer state moves into
            after the first step.
        initial_scale: first loss scale (fp16 only, as the next six).
        min_scale: smallest loss scale.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale on overflow, after ``hysteresis`` overflows.
        growth_interval: number of good steps.
        hysteresis: number of overflows before the scale falls.
        max_scale: largest loss scale.
        max_norm: clip the global norm of the unscaled gradients to it; 0 is off.
        norm_type: any p > 0, including ``math.inf``.
        tp_size: consecutive ranks that share the layers (tensor parallelism).
        extra_dp_size: number of replicas of the sharded model.
        enable_all_optimization: fused normalization and flash attention.
        enable_fused_normalization: use torch's kernel for RMS norms of transformers.
        enable_flash_attention: use torch's ``scaled_dot_product_attention`` for the model's attention, which has flash
            kernels on some devices. A model that does not support it is unchanged, with a warning.
        enable_sequence_parallelism: between sharded layers each rank of ``tp_size`` has a part of every sequence
            (``"split_gather"`` of HybridParallelPlugin).
        enable_jit_fused: no effect, with a warning: ``torch.compile`` compiles activations.
        enable_sequence_overlap: no effect; gathers of sequences and matrix products do not overlap.
        enable_async_reduce: reduce gradients during backward, and gather chunks ahead; False: neither.
        use_fp8: linear layers multiply in 8 bits if their sizes allow it.
        verbose: report the chunk search and skipped steps.
        fp8_communication: communicate parameters, gradients and activations between sharded layers in 8 bits.
        device_memory: an extension: device memory that may be used, in bytes or as a string such as ``"64MiB"``;
            ``None``: all of it, on a CPU no limit.
        update: an extension: ``"step"``; or ``"backward"``: update masters and optimizer state of a chunk in place as
            soon as its gradient is reduced, during backward. Gradients are not kept, and each step is one backward
            pass. Not with ``max_norm`` or ``precision="fp16"``. On a GPU this is done for chunks whose state is in host
            memory or on a disk.

    Examples:
        >>> from shardwise.booster import Booster
        >>> from shardwise.booster.plugin import GeminiPlugin
        >>> plugin = GeminiPlugin(precision="bf16", offload_optim_frac=1.0)
        >>> booster = Booster(plugin=plugin)
    """

    chunk_config_dict: Mapping[int, Mapping[str, Any]] | None = None
    chunk_init_device: torch.device | None = None
    placement_policy: str = "static"
    enable_gradient_accumulation: bool = False
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    precision: str = "fp16"
    master_weights: bool = True
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_m: int = 32
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    memstats: MemStats | str | os.PathLike[str] | None = None
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_sequence_parallelism: bool = False
    enable_jit_fused: bool = False
    enable_sequence_overlap: bool = False
    enable_async_reduce: bool = True
    use_fp8: bool = False
    verbose: bool = False
    fp8_communication: bool = False
    device_memory: int | str | None = field(default=None, kw_only=True)
    update: Literal["step", "backward"] = field(default="step", kw_only=True)

    def __post_init__(self) -> None:
        check_types(self, fractions=("search_range_m",), own=("memstats",))
        _check(self)
        scaler_plan(self)  # checked for every precision
        shards = next(iter(self.chunk_config_dict)) if self.chunk_config_dict else None
        ranks = None if shards is None else shards * self.extra_dp_size * self.tp_size
        to_plan(self, ranks)
        _ = self._stats  # raises errors about an unreadable file now, not at the first boost
        warn_unused(self, _unused(self))

    @cached_property
    def _stats(self) -> MemStats | None:
        """Return ``memstats``, read from a file if it is a path.

        Raises:
            OSError, ValueError: it cannot be read, or is not a trace.
            TypeError: it has another type.
        """
        stats = self.memstats
        if stats is None or isinstance(stats, MemStats):
            return stats
        if not isinstance(stats, str | os.PathLike):
            raise TypeError(f"memstats={stats!r:.80}: give a shardwise.MemStats, or the path of a saved one")
        return MemStats.load(Path(stats))

    def plan(self, world_size: int) -> Plan:
        """Return the plan for that many ranks.

        Raises:
            ValueError: ``tp_size`` does not divide the ranks, or there is no plan for the data-parallel ranks.
        """
        data_parallel_size(world_size, self.tp_size)
        return to_plan(self, world_size)

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Boosted:
        with changed_model(model, kernels_of(self), None):
            return super().configure(model, optimizer)

    def support_no_sync(self) -> bool:
        """Return False: chunks are reduced as soon as they are full, so full gradients are never kept."""
        return False

    def check_device(self, device: torch.device) -> None:
        """Check ``chunk_init_device``.

        Raises:
            NotImplementedError: ``chunk_init_device`` is not a device where this run keeps chunks.
        """
        if self.chunk_init_device is None:
            return
        tiers = _tiers(self)
        homes = {device.type} | ({"cpu"} if tiers.auto is not None or tiers.param_host_fraction > 0 else set())
        if torch.device(self.chunk_init_device).type not in homes:
            instead = f"leave it None: each chunk is created where it is kept, here on {device}"
            refuse("chunk_init_device", self.chunk_init_device, f"{instead}; offload_param_frac puts some on the host")

    def prepare(self, session: Any) -> None:
        if self.placement_policy == "auto" and self._stats is not None:
            session.use_memory_stats(self._stats)


def _unused(arguments: GeminiPlugin) -> dict[str, tuple[str, ...]]:
    """Return the arguments without effect, by reason."""
    a = arguments
    if a.placement_policy == "auto":
        keeps_gathered = any(entry.get("keep_gathered", False) for entry in (a.chunk_config_dict or {}).values())
        unused: dict[str, tuple[str, ...]] = {
            "for placement_policy='static' only": STATIC_FRACTIONS,
            "placement_policy='auto' decides what stays gathered": ("chunk_config_dict",) if keeps_gathered else (),
        }
    else:
        unused = {"for placement_policy='auto' only": (*AUTO_RATIOS, "memstats")}
        if a.offload_optim_frac == 0.0 and a.offload_param_frac == 0.0:
            unused["nothing is offloaded (but by an optimizer with nvme_offload_fraction > 0)"] = ("pin_memory",)
    reason = _nothing_ahead(a)
    if reason is not None:
        unused[reason] = ("max_prefetch",)
    return unused


def _nothing_ahead(arguments: GeminiPlugin) -> str | None:
    """Return why chunks are not prefetched for any ``max_prefetch``; ``None`` if they are prefetched."""
    a = arguments
    if not a.enable_async_reduce:
        return "nothing is gathered ahead with enable_async_reduce=False"
    if a.placement_policy == "static" and a.shard_param_frac == a.offload_param_frac == 0.0:
        return "all parameters stay gathered with shard_param_frac=0.0"
    return None


def _check(arguments: GeminiPlugin) -> None:
    a = arguments
    if a.strict_ddp_mode and (a.tp_size > 1 or a.enable_sequence_parallelism):
        raise ValueError(
            f"strict_ddp_mode=True with tp_size={a.tp_size}, enable_sequence_parallelism="
            f"{a.enable_sequence_parallelism}: strict mode is data parallelism only; drop one of them"
        )
    if a.placement_policy not in ("static", "auto"):
        hint = OLD_POLICIES.get(a.placement_policy)
        raise ValueError(
            f"placement_policy={a.placement_policy!r}: give 'static' or 'auto'" + (f" ({hint})" if hint else "")
        )
    for name in (*STATIC_FRACTIONS, *AUTO_RATIOS):
        fraction(name, getattr(a, name))
    for name in ("tp_size", "extra_dp_size"):
        integer(name, getattr(a, name), 1, what="a number of ranks")
    integer("max_prefetch", a.max_prefetch, 0, what="a number of chunks")
    _sequence_arguments(a)
    _check_search(a)
    if a.chunk_config_dict is not None:
        _check_chunks(a.chunk_config_dict)
    check_update(a, tp_size=a.tp_size)
    if a.enable_gradient_accumulation and a.update == "backward":
        raise ValueError(
            f"update={a.update!r} with enable_gradient_accumulation=True: a gradient is used as soon as it is reduced, "
            "so each step is one backward pass; give update='step'"
        )


def _check_search(arguments: GeminiPlugin) -> None:
    a, most = arguments, MOST_NUMEL // 2**20
    times = f"at most {most} (times 2**20 elements)"
    number("search_range_m", a.search_range_m, f"[0, {most}]", f"a range >= 0 and {times}")
    number("min_chunk_size_m", a.min_chunk_size_m, f"(0, {most}]", f"a size > 0 and {times}")
    if a.hidden_dim is not None:
        integer("hidden_dim", a.hidden_dim, 1, MOST_NUMEL, "a number of elements")
    step = a.hidden_dim or DEFAULT_HIDDEN_DIM
    if a.search_range_m * 2**20 // step >= MOST_SEARCHED:
        raise ValueError(
            f"search_range_m={a.search_range_m} in steps of hidden_dim={step} elements: more than {MOST_SEARCHED} "
            "sizes to try; give a smaller range or larger steps"
        )


def _check_chunks(config: Mapping[int, Mapping[str, Any]]) -> None:
    """Check ``chunk_config_dict``.

    Raises:
        ValueError: there are no entries, or an invalid one. All are checked, because the number of ranks selects one.
    """
    if not config:
        raise ValueError(f"chunk_config_dict={config!r}: give {{ranks: {{'chunk_size': elements}}}}, or None to search")
    for ranks, entry in config.items():
        where = f"chunk_config_dict[{ranks!r:.40}]={entry!r:.80}"
        if not fits(ranks, int) or ranks < 1:
            raise ValueError(f"{where}: give a number of ranks >= 1 as the key")
        if not isinstance(entry, Mapping) or "chunk_size" not in entry or set(entry) - {"chunk_size", "keep_gathered"}:
            raise ValueError(f"{where}: give 'chunk_size' (elements), and optionally 'keep_gathered'")
        if not fits(entry["chunk_size"], int) or not 1 <= entry["chunk_size"] <= MOST_NUMEL:
            raise ValueError(f"{where}: give a whole number of elements from 1 to {MOST_NUMEL} as 'chunk_size'")
        if not fits(entry.get("keep_gathered", False), bool):
            raise ValueError(f"{where}: give True or False as 'keep_gathered'")


def _packing(arguments: GeminiPlugin, shard_ranks: int | None) -> tuple[Packing, float]:
    """Return the packing and the fraction of parameters that may stay gathered."""
    a = arguments
    fraction = 1.0 - a.shard_param_frac
    if a.chunk_config_dict is None:
        search = BySearch(
            search_range_numel=int(a.search_range_m * 2**20),
            interval_numel=a.hidden_dim or DEFAULT_HIDDEN_DIM,
            min_chunk_numel=max(1, math.ceil(a.min_chunk_size_m * 2**20)),
        )
        return search, fraction
    entry = None if shard_ranks is None else a.chunk_config_dict.get(shard_ranks)
    if entry is None:
        raise ValueError(
            f"chunk_config_dict has entries for {sorted(a.chunk_config_dict)} ranks, but the model is sharded over "
            f"{shard_ranks}; add an entry {{{shard_ranks}: {{'chunk_size': ..., 'keep_gathered': ...}}}}"
        )
    return ByNumel(chunk_numel=int(entry["chunk_size"])), 1.0 if entry.get("keep_gathered", False) else fraction


def _tiers(arguments: GeminiPlugin) -> TierPlan:
    a = arguments
    auto = None
    if a.placement_policy == "auto":
        auto = AutoPlan(
            warmup_non_model_ratio=a.warmup_non_model_data_ratio,
            steady_capacity_ratio=a.steady_cuda_cap_ratio,
            margin_ratio=a.gpu_margin_mem_ratio,
        )
    param, state = (a.offload_param_frac, a.offload_optim_frac) if auto is None else (0.0, 0.0)
    host_is_used = auto is not None or param > 0 or state > 0
    return TierPlan(
        param_host_fraction=param,
        state_host_fraction=state,
        device_capacity_bytes=device_bytes(a.device_memory),
        pin_memory=a.pin_memory or (host_is_used and a.enable_async_reduce),
        auto=auto,
    )


def to_plan(arguments: GeminiPlugin, world_size: int | None = None) -> Plan:
    """Translate the arguments into a plan.

    Args:
        arguments: already checked by their own constructor.
        world_size: number of all ranks; only needed to choose the entry of ``chunk_config_dict``.

    Raises:
        ValueError: a value out of range, no entry of ``chunk_config_dict`` for that number of ranks, or
            ``extra_dp_size`` and ``tp_size`` do not divide the ranks.
    """
    a = arguments
    mesh = MeshPlan(dp_shard=-1, dp_replicate=a.extra_dp_size, tp=a.tp_size)
    sequence = _sequence_arguments(a)
    shard_ranks = None if world_size is None else mesh.resolve(world_size).dp_shard
    tiers = _tiers(a)
    packing, gathered_fraction = _packing(a, shard_ranks)
    # Offloaded parameters leave the device between uses, so they cannot stay gathered.
    gathered_fraction = 0.0 if tiers.auto is not None else min(gathered_fraction, 1.0 - tiers.param_host_fraction)
    return Plan(
        mesh=mesh,
        shard=ShardPlan(
            packing=packing,
            gathered_fraction=gathered_fraction,
            prefetch=a.max_prefetch if _nothing_ahead(a) is None else 0,
            reduce="every",
        ),
        precision=precision_plan(
            a.precision,
            a,
            master_weights=a.master_weights,
            output_dtype=torch.float32 if a.force_outputs_fp32 else None,
        ),
        grad=GradPlan(max_norm=a.max_norm, norm_type=a.norm_type, update=a.update),
        comm=CommPlan(overlap=a.enable_async_reduce, compress="fp8" if a.fp8_communication else None),
        tiers=tiers,
        verbose=a.verbose,
        tensor=TensorPlan(sequence=sequence.between_layers),
    )


def _sequence_arguments(arguments: GeminiPlugin) -> SequenceArguments:
    a = arguments
    return SequenceArguments(
        enabled=a.enable_sequence_parallelism, overlap=a.enable_sequence_overlap, tp_size=a.tp_size
    )
