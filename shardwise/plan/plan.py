"""The narrow waist: everything a run can be told, as frozen, validated data.

Front-ends translate their published arguments into a :class:`Plan`; the engine reads nothing else. Sizes are in
elements where the name ends in ``_numel`` and in bytes where it ends in ``_bytes``. The fields of a plan have no
defaults, because every front-end's defaults differ; :func:`replicated` and :func:`zero` build the common plans.

Source: the four choices (packing, gathered budget, when gradients are reduced, precision) that distinguish DDP,
ZeRO-1/2/3 (arXiv 1910.02054, section 5), FSDP and Gemini.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch

import shardwise.plan.text as plan_text
from shardwise.core.base.checked import MOST_BYTES, MOST_NUMEL, as_mapping, number, require, share, shown, switch, whole
from shardwise.plan.comm import CommPlan
from shardwise.plan.parallel import PipelinePlan, SequencePlan, TensorPlan, asked_of
from shardwise.plan.precision import HALF_DTYPES, PrecisionPlan, ScalerPlan
from shardwise.plan.tiers import AutoPlan, DiskPlan, TierPlan, on_device

__all__ = [
    "MOST_SEARCHED",
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
    "PipelinePlan",
    "Plan",
    "PrecisionPlan",
    "ScalerPlan",
    "SequencePlan",
    "ShardPlan",
    "TensorPlan",
    "TierPlan",
    "on_device",
    "replicated",
    "usual_exchange",
    "zero",
]

ELEMENTS = "a size in elements"
MOST_SEARCHED = 2**20
"""Sizes that a chunk search tries at most: a few seconds for a model of a hundred parameters."""


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """How the ranks divide: ``pp`` ranks that hold the stages of one model, of each stage ``tp`` ranks that hold parts
    of its layers, and ``dp_replicate`` groups of ``dp_shard`` such sets.

    Neighbouring ranks are those of ``tp`` first, then ``dp_shard``, ``dp_replicate`` and ``pp``; with ``dp_outside``
    first ``tp``, then ``pp``, ``dp_shard`` and ``dp_replicate``. ``dp_shard`` may be ``-1`` for "all ranks that
    remain". A shard group of 1 is plain replication (DDP).

    Of the ``dp_replicate`` x ``dp_shard`` data-parallel ranks ``sp`` neighbours see parts of the same sequences. They
    share parameters as any data-parallel ranks do, so it multiplies with no other size, and has to divide theirs.

    Of the ``dp_shard`` ranks ``secondary`` neighbours (those of one host) share a second copy of the parameters, which
    they keep from the first gather after an update and of which later gathers are made (hpZ of ZeRO++). It has to
    divide ``dp_shard``; ``None``, or ``dp_shard`` itself: no such copy. ``"host"``: as many neighbours as there are on
    each host, and none where that is one or all.
    """

    dp_shard: int
    dp_replicate: int
    tp: int = 1
    pp: int = 1
    dp_outside: bool = False
    sp: int = 1
    secondary: int | Literal["host"] | None = None

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("pp", self.pp), ("sp", self.sp)):
            whole(name, size, 1, what="a number of ranks,")
        if self.secondary not in (None, "host"):
            whole("secondary", self.secondary, 1, what="a number of ranks, 'host', or None,")
        switch("dp_outside", self.dp_outside)
        for name, size in (("dp_shard", self.dp_shard), ("dp_replicate", self.dp_replicate)):
            whole(name, size, -1, what="a number of ranks, or -1 for all that remain,")
            require(size != 0, f"{name}={size}: give a number of ranks >= 1, or -1 for all that remain")
        require(
            not (self.dp_shard == -1 and self.dp_replicate == -1),
            "dp_shard=-1 and dp_replicate=-1: at most one of them can be 'all ranks that remain'",
        )

    def resolve(self, world_size: int) -> MeshPlan:
        """The same plan with both sizes filled in for ``world_size`` ranks.

        Raises:
            ValueError: the sizes do not multiply to ``world_size``.
        """
        sizes = {"dp_shard": self.dp_shard, "dp_replicate": self.dp_replicate}
        sizes |= {name: size for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1}
        known = prod(size for size in sizes.values() if size != -1)
        if world_size % known:
            raise ValueError(
                f"{world_size} ranks cannot be divided into groups of {known} ("
                f"{', '.join(f'{name}={size}' for name, size in sizes.items())}); choose sizes whose product is "
                f"{world_size}"
            )
        found = {name: world_size // known if size == -1 else size for name, size in sizes.items()}
        require(
            prod(found.values()) == world_size,
            f"{' x '.join(f'{name}={size}' for name, size in found.items())} is {prod(found.values())} ranks, but "
            f"there are {world_size}",
        )
        among = found["dp_shard"] * found["dp_replicate"]
        require(
            among % self.sp == 0,
            f"sp={self.sp} ranks with parts of one sequence among {among} data-parallel ones (of {world_size}): give a "
            f"number that divides {among}",
        )
        require(
            not isinstance(self.secondary, int) or found["dp_shard"] % self.secondary == 0,
            f"secondary={self.secondary} ranks with a second copy of the parameters, of dp_shard={found['dp_shard']} "
            f"that shard them: give a number that divides {found['dp_shard']}, or None",
        )
        return MeshPlan(**(vars(self) | found))

    def data_parallel(self, rank: int, world_size: int) -> tuple[int, int]:
        """Which of those that see different data a rank is, or belongs to, and how many these are. Ranks that hold one
        model together, or share sequences, see the same.

        Raises:
            ValueError: see :meth:`resolve`.
        """
        sizes = self.resolve(world_size)
        number = sizes.dp_shard * sizes.dp_replicate // self.sp
        before = self.tp * self.pp if self.dp_outside else self.tp
        return rank // before // self.sp % number, number


@dataclass(frozen=True, kw_only=True)
class ByNumel:
    """Parameters in module order share a chunk until it holds ``chunk_numel`` elements; larger ones have their own.

    A model smaller than ``min_chunks`` such chunks gets smaller ones, about that many: so a size that is meant as a
    limit (a bucket) leaves something to overlap, and something to free, in small models too. 1 takes the size as it is.
    """

    chunk_numel: int
    min_chunks: int = 1

    def __post_init__(self) -> None:
        whole("min_chunks", self.min_chunks, 1, what="a number of chunks")
        whole("chunk_numel", self.chunk_numel, 1, MOST_NUMEL, ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class ByTensor:
    """One chunk a parameter (DeepSpeed's ZeRO-3); those of at most ``persist_numel`` elements stay gathered."""

    persist_numel: int

    def __post_init__(self) -> None:
        whole("persist_numel", self.persist_numel, 0, MOST_NUMEL, ELEMENTS)


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
        require(named, f"unit_classes={self.unit_classes} with unit_names={self.unit_names}: give one of them")
        if self.rest_numel is not None:
            whole("rest_numel", self.rest_numel, 1, MOST_NUMEL, ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class BySearch:
    """Gemini's chunk search: sizes ``start, start + interval, ... <= start + range`` (elements), least waste wins."""

    search_range_numel: int
    interval_numel: int
    min_chunk_numel: int

    def __post_init__(self) -> None:
        for name, least in (("search_range_numel", 0), ("interval_numel", 1), ("min_chunk_numel", 1)):
            whole(name, getattr(self, name), least, MOST_NUMEL, ELEMENTS)
        sizes = self.search_range_numel // self.interval_numel + 1
        require(
            sizes <= MOST_SEARCHED,
            f"search_range_numel={self.search_range_numel} in steps of interval_numel={self.interval_numel}: {sizes} "
            f"sizes to try; give a smaller range or larger steps, for {MOST_SEARCHED} at most",
        )


Packing = ByNumel | ByTensor | ByModule | BySearch


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Where parameters are between uses and when gradients are reduced.

    Attributes:
        packing: which parameters share a chunk.
        gathered_fraction: share of all parameter bytes that may stay gathered: 1.0 is ZeRO-1/2, 0.0 is ZeRO-3.
        gathered_budget_bytes: the same as bytes; the larger of the two limits counts. ``None``: fraction only.
        prefetch: how many units are gathered ahead of their use, once the order is known: none where nothing is
            gathered (``gathered_fraction=1.0``), or ahead of its use (``overlap=False``). Between CPU ranks of several
            hosts, where each gather is a round trip, more than so many small ones are, up to 16 MiB together.
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
        share("gathered_fraction", self.gathered_fraction)
        if self.gathered_budget_bytes is not None:
            whole("gathered_budget_bytes", self.gathered_budget_bytes, 0, MOST_BYTES, "bytes, or None,")
        whole("prefetch", self.prefetch, 0, what="a number of units")
        require(self.reduce in ("every", "last"), f"reduce={self.reduce!r}: give 'every' or 'last'")

    @property
    def always_gathered(self) -> bool:
        """True where parameters never leave the device (DDP, ZeRO-1, ZeRO-2)."""
        return self.gathered_fraction >= 1.0


@dataclass(frozen=True, kw_only=True)
class GradPlan:
    """What happens to gradients between backward and the update.

    Attributes:
        max_norm: clip the global norm to it; ``0.0`` is off.
        norm_type: p of the p-norm, ``math.inf`` included.
        average: over the backward passes of a step. ``"sum"`` is what autograd does (the caller divides the loss);
            ``"mean"`` divides by their number; ``"tokens"`` weights each by the ``tokens`` given to
            ``Session.backward``, without which a pass is an error.
        update: ``"step"`` updates in ``step()``. ``"backward"`` updates masters and optimizer state of each chunk in
            place as soon as its gradient is reduced; gradients are not kept, and each step is one backward pass. Not
            with clipping, a loss scale or ``average="tokens"``.
        over_ranks: ``"mean"`` over data-parallel ranks, token-weighted under ``average="tokens"``; or their ``"sum"``,
            which is that times their number: in ``.grad``, in norms, and in what is clipped to ``max_norm``.
    """

    max_norm: float
    norm_type: float
    average: Literal["sum", "mean", "tokens"]
    update: Literal["step", "backward"]
    over_ranks: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        number("max_norm", self.max_norm, "[0, inf)", "a finite norm >= 0 (0 is off)")
        number("norm_type", self.norm_type, "(0, inf]", "p > 0, or math.inf")
        require(self.average in ("sum", "mean", "tokens"), f"average={self.average!r}: give 'sum', 'mean' or 'tokens'")
        require(self.update in ("step", "backward"), f"update={self.update!r}: give 'step' or 'backward'")
        require(
            self.update == "step" or self.average != "tokens",
            f"update={self.update!r} with average={self.average!r}: the weights of a step are known at its end only; "
            "give update='step'",
        )
        require(
            self.update == "step" or self.max_norm == 0.0,
            f"update={self.update!r} with max_norm={self.max_norm}: the norm of all gradients is known only when the "
            "first have been used; give update='step'",
        )
        require(self.over_ranks in ("mean", "sum"), f"over_ranks={self.over_ranks!r}: give 'mean' or 'sum'")
        require(
            self.over_ranks == "mean" or self.average != "tokens",
            f"over_ranks={self.over_ranks!r} with average={self.average!r}: tokens are weights of a mean; give 'mean'",
        )


PARTS = ("mesh", "shard", "precision", "grad", "comm", "tiers", "tensor", "pipeline", "sequence")


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
    tensor: TensorPlan = dataclasses.field(default_factory=TensorPlan)
    pipeline: PipelinePlan = dataclasses.field(default_factory=PipelinePlan)
    sequence: SequencePlan = dataclasses.field(default_factory=SequencePlan)

    def __post_init__(self) -> None:
        switch("verbose", self.verbose)
        require(
            not self.comm.compressed or self.tiers.disk is None,
            f"{self.comm.compressed} (fp8_communication) with disk={self.tiers.disk!r:.80}: what travels in 8 bits or "
            "less is rounded behind its update, which data on a disk is not; use the host, or leave that None",
        )
        require(
            self.grad.update == "step" or self.precision.scaler is None,
            f"update={self.grad.update!r} with a loss scale ({self.precision.scaler!r:.80}): a step that overflows is "
            "skipped, which is known only when the first gradients have been used; train in bf16, or give "
            "update='step'",
        )
        comm, reduce = self.comm, self.shard.reduce
        require(
            not comm.exchange_bytes or (reduce == "every" and comm.overlap),
            f"exchange_bytes={comm.exchange_bytes} with reduce={reduce!r} and overlap={comm.overlap}: gradients share "
            "exchange buffers at stages 2 and 3, and only what is reduced beside backward needs more; leave it None",
        )
        here = self.tiers.param_host_fraction == self.tiers.param_disk_fraction == 0.0
        require(
            comm.compress_frozen is None or not (self.shard.always_gathered and here),
            f"compress_frozen={comm.compress_frozen!r} with gathered_fraction={self.shard.gathered_fraction}: frozen "
            "parameters stay gathered (stages 0 to 2), so they never travel; give a smaller share (stage 3), or leave "
            "it None",
        )
        self._check_secondary()
        for axis, part in (("tp", self.tensor), ("pp", self.pipeline), ("sp", self.sequence)):
            asked, size = asked_of(part), getattr(self.mesh, axis)
            require(
                size > 1 or not asked,
                f"{', '.join(asked)} with {axis}={size}: nothing is divided between ranks of that axis; give {axis} > "
                "1, or leave the rest as it is by default",
            )

    def _check_secondary(self) -> None:
        secondary, shard, tiers = self.mesh.secondary, self.shard, self.tiers
        require(
            secondary is None or not shard.always_gathered,
            f"secondary={secondary} with gathered_fraction={shard.gathered_fraction}: parameters stay gathered (stages "
            "0 to 2), so backward gathers nothing; give a smaller share (stage 3), or leave secondary None",
        )
        require(
            secondary is None or tiers.param_disk_fraction == 0.0,
            f"secondary={secondary} with param_disk_fraction={tiers.param_disk_fraction}: a second copy in memory of "
            "what memory does not hold; give param_host_fraction instead, or leave secondary None",
        )

    def but(self, **changes: object) -> Plan:
        """A copy with fields of the parts changed by name: ``plan.but(max_norm=1.0, prefetch=2)``.

        Raises:
            ValueError: no part of the plan has a field of that name.
        """
        parts = {name: getattr(self, name) for name in PARTS}
        own: dict[str, object] = {}
        inner: dict[str, dict[str, object]] = {}
        for field, value in changes.items():
            holders = [name for name, part in parts.items() if field in part.__dataclass_fields__]
            if field in self.__dataclass_fields__:
                own[field] = value
            elif holders:
                inner.setdefault(holders[0], {})[field] = value
            else:
                known = sorted(f for part in parts.values() for f in part.__dataclass_fields__)
                raise ValueError(f"a plan has no field {field!r}; known fields: {', '.join(known)}")
        changed = {name: replace(parts[name], **values) for name, values in inner.items()}  # at once: some go together
        return replace(self, **(parts | changed | own))

    def __str__(self) -> str:
        """Every field with its value, as TOML: what :meth:`save` writes."""
        return plan_text.toml(plan_text.to_tables(self, objects=True))

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values in dictionaries.

        Raises:
            ValueError: a field is an object of the program's own.
        """
        return plan_text.to_tables(self)

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], where: str = "plan") -> Plan:
        """A plan of all its fields, or of ``stage`` (0 to 3), and ``dtype`` where parameters are cast (as of
        :func:`zero`), with the fields that are to be other.

        Raises:
            ValueError: a field that there is not, is missing, or cannot have that value: each named, with ``where``.
        """
        rest = dict(as_mapping(where, tables, "a dict of a plan's fields, such as {'stage': 3}"))
        stage, dtype = rest.pop("stage", None), rest.pop("dtype", None)
        require(dtype is None or stage is not None, f"{where}: dtype={dtype!r} goes with stage = 0, 1, 2 or 3")
        base = None
        if stage is not None:
            require(type(stage) is int and 0 <= stage <= 3, f"{where}: stage={stage!r}: give 0, 1, 2 or 3")
            name = str(dtype).removeprefix("torch.")
            cast = None if dtype in (None, "none") else getattr(torch, name, dtype)
            require(cast is None or cast in (torch.float32, *HALF_DTYPES), f"{where}: dtype={dtype!r}: give 'bfloat16'")
            base = replicated(cast) if stage == 0 else zero(stage, cast)
        return plan_text.from_tables(cls, rest, where, base)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan of a TOML or JSON file, see :meth:`from_dict`.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no plan; the message has the file, the field and what is wrong.
        """
        return cls.from_dict(plan_text.read(path), os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every field to a ``.toml`` or ``.json`` file, which :meth:`load` reads as an equal plan."""
        plan_text.write(path, self.to_dict())

    def differences(self, other: Plan) -> list[str]:
        """What ``other`` has otherwise, a line each: ``"grad.max_norm: 0.0 -> 1.0"``."""
        if not isinstance(other, Plan):
            raise TypeError(f"other={shown(other)}: give a Plan")
        ours, theirs = (plan_text.to_tables(each, objects=True) for each in (self, other))
        return list(plan_text.differences(ours, theirs))


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


def usual_exchange() -> CommPlan:
    """How ranks exchange where nothing else was asked for; a front-end changes what its arguments say."""
    return CommPlan(overlap=True, shared_memory=None, gather_on_use=False, sync_init=True)


def zero(stage: Literal[1, 2, 3], param_dtype: torch.dtype | None = None, dp_replicate: int = 1) -> Plan:
    """ZeRO at ``stage`` over all ranks (or ``dp_replicate`` replicas of it: hybrid sharding).

    Stage 3 packs by module with nothing kept gathered and one unit fetched ahead. fp16 gets the dynamic scaler.
    """
    require(stage in (1, 2, 3), f"stage={stage!r}: give 1, 2 or 3")
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
        comm=usual_exchange(),
        tiers=on_device(),
        verbose=False,
    )


def replicated(param_dtype: torch.dtype | None = None) -> Plan:
    """Plain data parallelism: every rank holds everything, gradients are averaged over all ranks."""
    plan = zero(1, param_dtype)
    return replace(plan, mesh=MeshPlan(dp_shard=1, dp_replicate=-1))
