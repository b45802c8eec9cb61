"""The narrow waist: everything a run can be told, as frozen, validated data.

Front-ends translate their published arguments into a :class:`Plan`; the engine reads nothing else. Sizes are in
elements where the name ends in ``_numel`` and in bytes where it ends in ``_bytes``. The fields of a plan have no
defaults, because every front-end's defaults differ; :func:`replicated` and :func:`zero` build the common plans.

Source: the four choices (packing, gathered budget, when gradients are reduced, precision) that distinguish DDP,
ZeRO-1/2/3 (arXiv 1910.02054, section 5), FSDP and Gemini.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

__all__ = [
    "AutoPlan",
    "ByModule",
    "ByNumel",
    "BySearch",
    "ByTensor",
    "CommPlan",
    "DiskPlan",
    "GradPlan",
    "MeshPlan",
    "Packing",
    "Plan",
    "PrecisionPlan",
    "ScalerPlan",
    "ShardPlan",
    "TierPlan",
    "on_device",
    "replicated",
    "zero",
]

HALF_DTYPES = (torch.float16, torch.bfloat16)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """How the ranks divide: ``dp_replicate`` groups of ``dp_shard`` ranks each.

    ``dp_shard`` may be ``-1`` for "all ranks that remain". A shard group of 1 is plain replication (DDP).
    """

    dp_shard: int
    dp_replicate: int

    def __post_init__(self) -> None:
        _require(self.dp_shard == -1 or self.dp_shard >= 1, f"dp_shard={self.dp_shard}: give a size >= 1, or -1")
        valid = self.dp_replicate == -1 or self.dp_replicate >= 1
        _require(valid, f"dp_replicate={self.dp_replicate}: give a number of replicas >= 1, or -1")
        _require(
            not (self.dp_shard == -1 and self.dp_replicate == -1),
            "dp_shard=-1 and dp_replicate=-1: at most one of them can be 'all ranks that remain'",
        )

    def resolve(self, world_size: int) -> MeshPlan:
        """The same plan with both sizes filled in for ``world_size`` ranks.

        Raises:
            ValueError: the sizes do not multiply to ``world_size``.
        """
        shard, replicate = self.dp_shard, self.dp_replicate
        known = replicate if shard == -1 else shard
        if world_size % known:
            raise ValueError(
                f"{world_size} ranks cannot be divided into groups of {known} "
                f"(dp_shard={shard}, dp_replicate={replicate}); choose sizes whose product is {world_size}"
            )
        shard = world_size // replicate if shard == -1 else shard
        replicate = world_size // shard if replicate == -1 else replicate
        _require(
            shard * replicate == world_size,
            f"dp_shard={shard} x dp_replicate={replicate} is {shard * replicate} ranks, but there are {world_size}",
        )
        return MeshPlan(dp_shard=shard, dp_replicate=replicate)


@dataclass(frozen=True, kw_only=True)
class ByNumel:
    """Parameters in module order share a chunk until it holds ``chunk_numel`` elements; larger ones have their own.

    A model smaller than ``min_chunks`` such chunks gets smaller ones, about that many: so a size that is meant as a
    limit (a bucket) leaves something to overlap, and something to free, in small models too. 1 takes the size as it is.
    """

    chunk_numel: int
    min_chunks: int = 1

    def __post_init__(self) -> None:
        _require(self.min_chunks >= 1, f"min_chunks={self.min_chunks}: give a number of chunks >= 1")
        _require(self.chunk_numel >= 1, f"chunk_numel={self.chunk_numel}: give a size in elements >= 1")


@dataclass(frozen=True, kw_only=True)
class ByTensor:
    """One chunk a parameter (DeepSpeed's ZeRO-3); those of at most ``persist_numel`` elements stay gathered."""

    persist_numel: int

    def __post_init__(self) -> None:
        _require(self.persist_numel >= 0, f"persist_numel={self.persist_numel}: give a size in elements >= 0")


@dataclass(frozen=True, kw_only=True)
class ByModule:
    """One unit a block (FSDP). ``unit_classes`` names module classes; empty: the entries of every ModuleList/Sequential
    that hold parameters and are not inside another unit. What no unit holds is grouped by the root's children.

    ``unit_names`` names the modules themselves instead. They may be inside each other: a parameter belongs to the
    innermost. What none holds is packed as by ``ByNumel(rest_numel)``, or where that is ``None`` is one unit."""

    unit_classes: tuple[str, ...]
    unit_names: tuple[str, ...] = ()
    rest_numel: int | None = None

    def __post_init__(self) -> None:
        named = not self.unit_names or not self.unit_classes
        _require(named, f"unit_classes={self.unit_classes} with unit_names={self.unit_names}: give one of them")
        _require(self.rest_numel is None or self.rest_numel >= 1, f"rest_numel={self.rest_numel}: give >= 1 elements")


@dataclass(frozen=True, kw_only=True)
class BySearch:
    """Gemini's chunk search: sizes ``start, start + interval, ... <= start + range`` (elements), least waste wins."""

    search_range_numel: int
    interval_numel: int
    min_chunk_numel: int

    def __post_init__(self) -> None:
        _require(self.search_range_numel >= 0, f"search_range_numel={self.search_range_numel}: give >= 0 elements")
        _require(self.interval_numel >= 1, f"interval_numel={self.interval_numel}: give >= 1 elements")
        _require(self.min_chunk_numel >= 1, f"min_chunk_numel={self.min_chunk_numel}: give >= 1 elements")


Packing = ByNumel | ByTensor | ByModule | BySearch


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Where parameters are between uses and when gradients are reduced.

    Attributes:
        packing: which parameters share a chunk.
        gathered_fraction: share of all parameter bytes that may stay gathered: 1.0 is ZeRO-1/2, 0.0 is ZeRO-3.
        gathered_budget_bytes: the same as bytes; the larger of the two limits counts. ``None``: fraction only.
        prefetch: how many units are gathered ahead of their use, once the order is known.
        reduce: ``"every"`` backward pass reduces and keeps only the shard (ZeRO-2/3); ``"last"`` keeps whole
            gradients so that ``no_sync`` passes cost no communication (DDP, ZeRO-1).
        kept: names of parameters that stay gathered, whatever the budget.
    """

    packing: Packing
    gathered_fraction: float
    gathered_budget_bytes: int | None
    prefetch: int
    reduce: Literal["every", "last"]
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.gathered_fraction <= 1.0, f"gathered_fraction={self.gathered_fraction}: give a share in [0, 1]"
        )
        budget = self.gathered_budget_bytes
        _require(budget is None or budget >= 0, f"gathered_budget_bytes={budget}: give bytes >= 0, or None")
        _require(self.prefetch >= 0, f"prefetch={self.prefetch}: give a number of units >= 0")
        _require(self.reduce in ("every", "last"), f"reduce={self.reduce!r}: give 'every' or 'last'")

    @property
    def always_gathered(self) -> bool:
        """True where parameters never leave the device (DDP, ZeRO-1, ZeRO-2)."""
        return self.gathered_fraction >= 1.0


@dataclass(frozen=True, kw_only=True)
class ScalerPlan:
    """The dynamic loss scale of fp16 (DynamicGradScaler's published arguments)."""

    initial_scale: float
    min_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    max_scale: float

    def __post_init__(self) -> None:
        _require(self.initial_scale > 0, f"initial_scale={self.initial_scale}: the loss scale must be > 0")
        _require(
            self.min_scale <= self.initial_scale <= self.max_scale,
            f"initial_scale={self.initial_scale} is outside [min_scale={self.min_scale}, max_scale={self.max_scale}]",
        )
        _require(self.growth_factor > 1, f"growth_factor={self.growth_factor}: give a factor > 1")
        _require(0 < self.backoff_factor < 1, f"backoff_factor={self.backoff_factor}: give a factor in (0, 1)")
        _require(self.growth_interval >= 1, f"growth_interval={self.growth_interval}: give a number of steps >= 1")
        _require(self.hysteresis >= 0, f"hysteresis={self.hysteresis}: give a number of overflows >= 0")


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Number formats.

    Attributes:
        param_dtype: floating parameters are cast to it for compute; ``None`` keeps each parameter's own.
        buffer_dtype: the same for floating buffers.
        master_weights: keep fp32 copies of the shards whose compute dtype is 16-bit; the optimizer updates those.
        reduce_dtype: gradients travel in it; ``None``: the parameter's compute dtype.
        accumulate_dtype: gradient shards are summed over backward passes in it; ``None``: the reduce dtype.
        cast_inputs: cast floating inputs of the model to ``param_dtype`` (nested containers too).
        output_dtype: cast floating outputs; ``None`` leaves them.
        scaler: dynamic loss scale, or ``None``.
    """

    param_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    master_weights: bool
    reduce_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype | None
    cast_inputs: bool
    output_dtype: torch.dtype | None
    scaler: ScalerPlan | None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "buffer_dtype", "reduce_dtype", "accumulate_dtype", "output_dtype"):
            dtype = getattr(self, name)
            _require(
                dtype is None or dtype.is_floating_point, f"{name}={dtype}: give a floating-point torch.dtype, or None"
            )


@dataclass(frozen=True, kw_only=True)
class GradPlan:
    """What happens to gradients between backward and the update.

    Attributes:
        max_norm: clip the global norm to it; ``0.0`` is off.
        norm_type: p of the p-norm, ``math.inf`` included.
        average: over the backward passes of a step. ``"sum"`` is what autograd does (the caller divides the loss);
            ``"mean"`` divides by their number; ``"tokens"`` weights each by the ``tokens`` given to ``backward``.
            Over data-parallel ranks the mean is always taken (token-weighted under ``"tokens"``).
        update: ``"step"`` updates in ``step()``. ``"backward"`` begins with each chunk as soon as its gradient is
            reduced. Under clipping or a loss scale that is speculative, and undone exactly where ``step()`` finds that
            it was wrong, at the price of a copy of the state. Without them gradients are not kept, and each step is one
            backward pass. Not with ``average="tokens"``.
    """

    max_norm: float
    norm_type: float
    average: Literal["sum", "mean", "tokens"]
    update: Literal["step", "backward"]

    def __post_init__(self) -> None:
        valid = self.max_norm >= 0  # False for NaN
        _require(valid, f"max_norm={self.max_norm}: give a norm >= 0 (0 is off)")
        _require(self.norm_type > 0, f"norm_type={self.norm_type}: give p > 0, or math.inf")
        _require(self.average in ("sum", "mean", "tokens"), f"average={self.average!r}: give 'sum', 'mean' or 'tokens'")
        _require(self.update in ("step", "backward"), f"update={self.update!r}: give 'step' or 'backward'")
        _require(
            self.update == "step" or self.average != "tokens",
            f"update={self.update!r} with average={self.average!r}: the weights of a step are known at its end only; "
            "give update='step'",
        )


PAGE_BYTES = 4096  # what unbuffered disk access wants offsets, lengths and addresses to be multiples of


@dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """How shards and optimizer state travel to and from a disk (the ``aio`` arguments of ZeRO-Infinity).

    Attributes:
        directory: per-run directories are made in it.
        block_bytes: largest single request, a multiple of 4096.
        queue_depth: requests in flight for each thread.
        threads: submitting threads; while one makes checksums the others' requests go on.
        single_submit: submit requests one by one, not up to ``queue_depth`` at once.
        overlap_events: collect completions while further requests are in flight.
        state_buffers: host buffers for optimizer tiles; three overlap a read, an update and a write.
        param_buffers: host buffers for parameter shards.
    """

    directory: str
    block_bytes: int = 2**20
    queue_depth: int = 8
    threads: int = 2
    single_submit: bool = False
    overlap_events: bool = True
    state_buffers: int = 8
    param_buffers: int = 5

    def __post_init__(self) -> None:
        _require(bool(self.directory), f"directory={self.directory!r}: name a directory on the disk to use")
        aligned = self.block_bytes > 0 and self.block_bytes % PAGE_BYTES == 0
        _require(aligned, f"block_bytes={self.block_bytes}: give a positive multiple of {PAGE_BYTES}")
        for name in ("queue_depth", "threads", "state_buffers", "param_buffers"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: give a number >= 1")


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """Placement from the memory trace (Gemini's ``auto``); shares of the device's capacity, in [0, 1].

    Attributes:
        warmup_non_model_ratio: what the first step leaves free for everything that is not model data.
        steady_capacity_ratio: what later steps use at most, traced non-model data included.
        margin_ratio: share of what then remains that optimizer state moves into.
    """

    warmup_non_model_ratio: float
    steady_capacity_ratio: float
    margin_ratio: float

    def __post_init__(self) -> None:
        for name in ("warmup_non_model_ratio", "steady_capacity_ratio", "margin_ratio"):
            value = getattr(self, name)
            _require(0.0 <= value <= 1.0, f"{name}={value}: give a share in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """Which memory is the home of what: the device, the host's memory, or a disk.

    Attributes:
        param_host_fraction: share of the bytes of parameter shards whose home is the host.
        param_disk_fraction: the same for the disk; what neither has is the device's.
        state_host_fraction: share of fp32 masters, optimizer state and reduced gradients whose home is the host.
        state_disk_fraction: share of masters and state whose home is the disk (their gradients are the host's).
        device_capacity_bytes: memory of the device that may be used; ``None``: no limit, under ``auto`` all a GPU has.
        pin_memory: host memory is page-locked (where there is CUDA).
        disk: how to reach the disk; needed where a disk share is not 0.
        auto: place by the memory trace; ``None`` for the fixed shares above.
    """

    param_host_fraction: float
    param_disk_fraction: float
    state_host_fraction: float
    state_disk_fraction: float
    device_capacity_bytes: int | None
    pin_memory: bool
    disk: DiskPlan | None
    auto: AutoPlan | None

    def __post_init__(self) -> None:
        for kind in ("param", "state"):
            host, disk = getattr(self, f"{kind}_host_fraction"), getattr(self, f"{kind}_disk_fraction")
            valid = 0.0 <= host <= 1.0 and 0.0 <= disk <= 1.0 and host + disk <= 1.0 + 1e-9
            shares = f"{kind}_host_fraction={host}, {kind}_disk_fraction={disk}"
            _require(valid, f"{shares}: give shares in [0, 1] whose sum is at most 1")
            _require(disk == 0.0 or self.disk is not None, f"{shares} with disk={self.disk}: give a DiskPlan")
        capacity = self.device_capacity_bytes
        _require(capacity is None or capacity > 0, f"device_capacity_bytes={capacity}: give bytes > 0, or None")

    @property
    def all_on_device(self) -> bool:
        """Whether nothing is at home elsewhere."""
        params = self.param_host_fraction + self.param_disk_fraction
        return self.auto is None and params + self.state_host_fraction + self.state_disk_fraction == 0.0


def on_device() -> TierPlan:
    """Everything on the device, without a limit."""
    return TierPlan(
        param_host_fraction=0.0,
        param_disk_fraction=0.0,
        state_host_fraction=0.0,
        state_disk_fraction=0.0,
        device_capacity_bytes=None,
        pin_memory=False,
        disk=None,
        auto=None,
    )


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """How bytes travel.

    Attributes:
        overlap: reduce during backward and gather ahead; ``False`` does the same work in sequence.
        shared_memory: exchange through shared memory between CPU ranks of one host; ``None`` chooses by itself.
        same_order: the caller promises that all ranks run the same modules in the same order, and fail alike, so that
            gathers and reductions need no agreement between ranks. ``False`` is always safe.
        gather_on_use: after a step, parameters that stay gathered are renewed in the background and waited for at their
            first use (until then they read as before; change them inside ``gathered()``). ``False``: by ``step()``.
        sync_init: every rank starts from rank 0's parameters and buffers (DDP does the same).
        predivide: gradients are divided by it before their sum over ranks, and by what is left of their number after.
    """

    overlap: bool
    shared_memory: bool | None
    same_order: bool
    gather_on_use: bool
    sync_init: bool
    predivide: float = 1.0

    def __post_init__(self) -> None:
        _require(self.predivide > 0, f"predivide={self.predivide}: give a divisor > 0")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. Frozen; change a copy with :func:`dataclasses.replace` or :meth:`but`."""

    mesh: MeshPlan
    shard: ShardPlan
    precision: PrecisionPlan
    grad: GradPlan
    comm: CommPlan
    tiers: TierPlan
    verbose: bool

    @property
    def streams_gradients(self) -> bool:
        """Whether a gradient may be used, and its memory again, before the next one is there."""
        return self.grad.update == "backward" and self.grad.max_norm == 0.0 and self.precision.scaler is None

    def but(self, **changes: object) -> Plan:
        """A copy with fields of the parts changed by name: ``plan.but(max_norm=1.0, prefetch=2)``.

        Raises:
            ValueError: no part of the plan has a field of that name.
        """
        parts = {name: getattr(self, name) for name in ("mesh", "shard", "precision", "grad", "comm", "tiers")}
        own: dict[str, object] = {}
        for field, value in changes.items():
            holders = [name for name, part in parts.items() if field in part.__dataclass_fields__]
            if field in self.__dataclass_fields__:
                own[field] = value
            elif holders:
                parts[holders[0]] = replace(parts[holders[0]], **{field: value})
            else:
                known = sorted(f for part in parts.values() for f in part.__dataclass_fields__)
                raise ValueError(f"a plan has no field {field!r}; known fields: {', '.join(known)}")
        return replace(self, **(parts | own))


def _precision(param_dtype: torch.dtype | None, scaler: ScalerPlan | None) -> PrecisionPlan:
    return PrecisionPlan(
        param_dtype=param_dtype,
        buffer_dtype=param_dtype,
        master_weights=True,
        reduce_dtype=None,
        accumulate_dtype=None,
        cast_inputs=param_dtype is not None,
        output_dtype=None,
        scaler=scaler,
    )


def _default_scaler() -> ScalerPlan:
    return ScalerPlan(
        initial_scale=2.0**16,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=1000,
        hysteresis=2,
        max_scale=2.0**32,
    )


def zero(stage: Literal[1, 2, 3], param_dtype: torch.dtype | None = None, dp_replicate: int = 1) -> Plan:
    """ZeRO at ``stage`` over all ranks (or ``dp_replicate`` replicas of it: hybrid sharding).

    Stage 3 packs by module with nothing kept gathered and one unit fetched ahead. fp16 gets the dynamic scaler.
    """
    _require(stage in (1, 2, 3), f"stage={stage!r}: give 1, 2 or 3")
    packing: Packing = ByModule(unit_classes=()) if stage == 3 else ByNumel(chunk_numel=8 * 1024**2, min_chunks=8)
    return Plan(
        mesh=MeshPlan(dp_shard=-1, dp_replicate=dp_replicate),
        shard=ShardPlan(
            packing=packing,
            gathered_fraction=0.0 if stage == 3 else 1.0,
            gathered_budget_bytes=None,
            prefetch=1 if stage == 3 else 0,
            reduce="last" if stage == 1 else "every",
        ),
        precision=_precision(param_dtype, _default_scaler() if param_dtype is torch.float16 else None),
        grad=GradPlan(max_norm=0.0, norm_type=2.0, average="sum", update="step"),
        comm=CommPlan(overlap=True, shared_memory=None, same_order=False, gather_on_use=False, sync_init=True),
        tiers=on_device(),
        verbose=False,
    )


def replicated(param_dtype: torch.dtype | None = None) -> Plan:
    """Plain data parallelism: every rank holds everything, gradients are averaged over all ranks."""
    plan = zero(1, param_dtype)
    return replace(plan, mesh=MeshPlan(dp_shard=1, dp_replicate=-1))
