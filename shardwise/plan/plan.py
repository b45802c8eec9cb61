"""The plan of a run: all settings as frozen, validated dataclasses.

Front-ends translate their published arguments into a :class:`Plan`, and the engine reads nothing else. Sizes are in
elements where the name ends in ``_numel`` and in bytes where it ends in ``_bytes``. Most fields have no defaults,
because every front-end's defaults differ; :func:`replicated` and :func:`zero` build the common plans.

Source: the four choices (packing, gathered budget, when gradients are reduced, precision) that distinguish DDP,
ZeRO-1/2/3 (arXiv 1910.02054, section 5), FSDP and Gemini.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, get_type_hints

import torch

import shardwise.plan.text as plan_text
from shardwise.core.base.validate import (
    MOST_BYTES,
    MOST_NUMEL,
    as_mapping,
    boolean,
    check_flags,
    did_you_mean,
    fraction,
    integer,
    number,
    require,
    short_repr,
)
from shardwise.plan.parallel import PipelinePlan, SequencePlan, TensorPlan, settings_of
from shardwise.plan.precision import HALF_DTYPES, PrecisionPlan
from shardwise.plan.scaler_arguments import ScalerArguments, scaler_plan
from shardwise.plan.tiers import TierPlan

MOST_DIVISOR = 2.0**32
MOST_SECONDS = 315_360_000.0
BLOCKS = ("fp8", "int8", "int4")
ELEMENTS = "a size in elements"
MOST_SEARCHED = 2**20
"""The most sizes that a chunk search tries: a few seconds for a model of a hundred parameters."""


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """The device mesh: how many ranks there are along each axis.

    Attributes:
        dp_shard: number of ranks that shard one copy of the parameters. 1: full replication (DDP); -1: all remaining
            ranks.
        dp_replicate: number of copies of the parameters; -1: one for each remaining rank.
        tp: number of ranks that split the layers of a stage (tensor parallelism).
        pp: number of stages of the model (pipeline parallelism).
        dp_outside: order of the axes, from neighboring ranks to distant ones. ``False``: ``tp``, ``dp_shard``,
            ``dp_replicate``, ``pp``. ``True``: ``tp``, ``pp``, ``dp_shard``, ``dp_replicate``.
        sp: number of neighboring data-parallel ranks that see parts of the same sequences. They shard parameters as
            all data-parallel ranks do, so ``sp`` divides ``dp_replicate * dp_shard`` and adds no ranks.
        secondary: number of neighboring ranks (of one host) that keep a second copy of the parameters from the first
            gather after an update on, which later gathers read (hpZ of ZeRO++). It divides ``dp_shard``. ``"host"``:
            the number of ranks on each host. ``None`` or ``dp_shard``: no second copy.

    Examples:
        >>> from shardwise.plan import MeshPlan, zero
        >>> plan = zero(3).but(mesh=MeshPlan(dp_shard=-1, dp_replicate=1))  # or zero(3).but(tp=2) for one field
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
            integer(name, size, 1, what="a number of ranks,")
        if self.secondary not in (None, "host"):
            integer("secondary", self.secondary, 1, what="a number of ranks, 'host', or None,")
        boolean("dp_outside", self.dp_outside)
        for name, size in (("dp_shard", self.dp_shard), ("dp_replicate", self.dp_replicate)):
            integer(name, size, -1, what="a number of ranks, or -1 for all that remain,")
            require(size != 0, f"{name}={size}: give a number of ranks >= 1, or -1 for all that remain")
        require(
            not (self.dp_shard == -1 and self.dp_replicate == -1),
            "dp_shard=-1 and dp_replicate=-1: at most one of them can be 'all ranks that remain'",
        )

    def resolve(self, world_size: int) -> MeshPlan:
        """Return the same plan with all sizes filled in for ``world_size`` ranks.

        Args:
            world_size: number of all ranks.

        Raises:
            ValueError: the sizes do not multiply to ``world_size``.
        """
        sizes = {"dp_shard": self.dp_shard, "dp_replicate": self.dp_replicate}
        sizes |= {name: size for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1}
        known = prod(size for size in sizes.values() if size != -1)
        if world_size % known:
            shown = [f"{name}={n}{' (replicas)' * (name == 'dp_replicate')}" for name, n in sizes.items() if n > 1]
            raise ValueError(
                f"{' x '.join(shown)} needs a multiple of {known} ranks, but the number of ranks is {world_size}. "
                "Start another number with torchrun or 'shardwise run', or change the sizes"
            )
        axes = {name: world_size // known if size == -1 else size for name, size in sizes.items()}
        require(
            prod(axes.values()) == world_size,
            f"{' x '.join(f'{name}={size}' for name, size in axes.items())} is {prod(axes.values())} ranks, but "
            f"there are {world_size}; choose sizes whose product is {world_size}, or -1 for one of them",
        )
        among = axes["dp_shard"] * axes["dp_replicate"]
        require(
            among % self.sp == 0,
            f"sp={self.sp} needs a multiple of {self.sp} data-parallel ranks, but their number is {among} (of "
            f"{world_size} ranks). Start more ranks, or use a smaller sp",
        )
        require(
            not isinstance(self.secondary, int) or axes["dp_shard"] % self.secondary == 0,
            f"secondary={self.secondary} does not divide dp_shard={axes['dp_shard']}; give a number that divides "
            f"{axes['dp_shard']}, or None",
        )
        return MeshPlan(**(vars(self) | axes))

    def data_parallel(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return a rank's data-parallel index and how many there are, for a data loader.

        Ranks that hold parts of one model, or of the same sequences, have the same index: they see the same data.

        Args:
            rank: the rank in ``torch.distributed``.
            world_size: number of all ranks.

        Returns:
            Index and number, for ``DistributedSampler(rank=..., num_replicas=...)``.

        Raises:
            ValueError: the sizes do not multiply to ``world_size``.
        """
        sizes = self.resolve(world_size)
        number = sizes.dp_shard * sizes.dp_replicate // self.sp
        before = self.tp * self.pp if self.dp_outside else self.tp
        return rank // before // self.sp % number, number


@dataclass(frozen=True, kw_only=True)
class ByNumel:
    """Pack parameters in module order into chunks. A larger parameter has its own chunk.

    Attributes:
        chunk_numel: largest number of elements of a chunk.
        min_chunks: a model smaller than this number of chunks gets about so many smaller ones, so that small models,
            too, can overlap and free chunks. 1 keeps the size.

    Examples:
        >>> from shardwise.plan import ByNumel, zero
        >>> plan = zero(2).but(packing=ByNumel(chunk_numel=4 * 2**20))
    """

    chunk_numel: int
    min_chunks: int = 1

    def __post_init__(self) -> None:
        integer("min_chunks", self.min_chunks, 1, what="a number of chunks")
        integer("chunk_numel", self.chunk_numel, 1, MOST_NUMEL, ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class ByTensor:
    """Pack each parameter into its own chunk (DeepSpeed's ZeRO-3).

    Attributes:
        persist_numel: parameters up to this number of elements stay gathered.

    Examples:
        >>> from shardwise.plan import ByTensor, zero
        >>> plan = zero(3).but(packing=ByTensor(persist_numel=100_000))
    """

    persist_numel: int

    def __post_init__(self) -> None:
        integer("persist_numel", self.persist_numel, 0, MOST_NUMEL, ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class ByModule:
    """Pack each block of the model into a unit (FSDP).

    Attributes:
        unit_classes: names of module classes that are units. Empty: the entries of every ModuleList or Sequential that
            have parameters and are not inside another unit. Other parameters are grouped by the root's children.
        unit_names: names of modules that are units, instead of classes. They may be nested; a parameter belongs to the
            innermost unit.
        rest_numel: with ``unit_names``, pack the other parameters as ``ByNumel(rest_numel)``; ``None``: one unit.

    Examples:
        >>> from shardwise.plan import ByModule, zero
        >>> plan = zero(3).but(packing=ByModule(unit_classes=("LlamaDecoderLayer",)))
    """

    unit_classes: tuple[str, ...]
    unit_names: tuple[str, ...] = ()
    rest_numel: int | None = None

    def __post_init__(self) -> None:
        named = not self.unit_names or not self.unit_classes
        require(named, f"unit_classes={self.unit_classes} with unit_names={self.unit_names}: give one of them")
        if self.rest_numel is not None:
            integer("rest_numel", self.rest_numel, 1, MOST_NUMEL, ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class BySearch:
    """Search the chunk size with the least padding (Gemini).

    Attributes:
        search_range_numel: how far above the smallest size the search goes, in elements.
        interval_numel: the step of the search, in elements.
        min_chunk_numel: the smallest size, in elements; the search starts there, or at the largest parameter.

    Examples:
        >>> from shardwise.plan import BySearch, zero
        >>> plan = zero(3).but(packing=BySearch(search_range_numel=2**25, interval_numel=2**20, min_chunk_numel=2**20))
    """

    search_range_numel: int
    interval_numel: int
    min_chunk_numel: int

    def __post_init__(self) -> None:
        for name, least in (("search_range_numel", 0), ("interval_numel", 1), ("min_chunk_numel", 1)):
            integer(name, getattr(self, name), least, MOST_NUMEL, ELEMENTS)
        sizes = self.search_range_numel // self.interval_numel + 1
        require(
            sizes <= MOST_SEARCHED,
            f"search_range_numel={self.search_range_numel} in steps of interval_numel={self.interval_numel}: {sizes} "
            f"sizes to try; give a smaller range or larger steps, for {MOST_SEARCHED} at most",
        )


Packing = ByNumel | ByTensor | ByModule | BySearch


@dataclass(frozen=True, kw_only=True)
class ParamGroupPlan:
    """Options of modules or parameters that are selected by name.

    Attributes:
        names: names of modules, each with everything inside it, or of parameters. The longest matching name decides
            the options of a parameter.
        reshard_after_forward: the argument of FSDP2. ``False``: the parameters stay gathered for any budget and
            offloaded fraction, so backward gathers nothing. ``True``: they are freed after the forward pass of their
            module and gathered again in backward, even if the budget would keep them.

    Examples:
        >>> from shardwise.plan import ParamGroupPlan, zero
        >>> plan = zero(3).but(groups=(ParamGroupPlan(names=("lm_head",), reshard_after_forward=False),))
    """

    names: tuple[str, ...]
    reshard_after_forward: bool

    def __post_init__(self) -> None:
        named = isinstance(self.names, tuple) and self.names and all(n and isinstance(n, str) for n in self.names)
        require(bool(named), f"names={short_repr(self.names)} of a parameter group: give a tuple of names of modules")
        require(
            isinstance(self.reshard_after_forward, bool),
            f"reshard_after_forward={short_repr(self.reshard_after_forward)} of {', '.join(self.names):.80} is neither "
            "True nor False. For backward gathers from a number of neighboring ranks set secondary in the plan's "
            "mesh, for all modules, and give True here",
        )


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How parameters are packed and gathered, and when gradients are reduced.

    Attributes:
        packing: which parameters share a chunk.
        gathered_fraction: fraction of all parameter bytes that may stay gathered: 1.0 is ZeRO-1/2, 0.0 is ZeRO-3.
        gathered_budget_bytes: the same limit in bytes; the larger limit counts. With ``None`` only the fraction counts.
        prefetch: number of units that are gathered ahead of their use, once the order is known. No effect with
            ``gathered_fraction=1.0`` or ``overlap=False``. Between CPU ranks of several hosts, where each gather is a
            round trip, more small units are gathered ahead, up to 16 MiB together.
        reduce: ``"every"``: each backward pass reduces and keeps only the shard (ZeRO-2/3). ``"last"``: full gradients
            are kept, so that ``no_sync`` passes need no communication (DDP, ZeRO-1).
        groups: options of single modules, which override the options above.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(3).but(gathered_fraction=0.25, prefetch=2)  # keep a quarter of the parameters gathered
    """

    packing: Packing
    gathered_fraction: float
    gathered_budget_bytes: int | None = None
    prefetch: int = 0
    reduce: Literal["every", "last"]
    groups: tuple[ParamGroupPlan, ...] = ()

    def __post_init__(self) -> None:
        fraction("gathered_fraction", self.gathered_fraction)
        if self.gathered_budget_bytes is not None:
            integer("gathered_budget_bytes", self.gathered_budget_bytes, 0, MOST_BYTES, "bytes, or None,")
        integer("prefetch", self.prefetch, 0, what="a number of units")
        require(self.reduce in ("every", "last"), f"reduce={self.reduce!r}: give 'every' or 'last'")
        groups = f"groups={short_repr(self.groups)}"
        fits = isinstance(self.groups, tuple | list) and all(isinstance(each, ParamGroupPlan) for each in self.groups)
        require(fits, f"{groups}: give a tuple of ParamGroupPlan objects")
        names = [name for group in self.groups for name in group.names]
        require(len(names) == len(set(names)), f"{groups} have a name twice; give each name once")

    @property
    def always_gathered(self) -> bool:
        """Whether all parameters stay gathered (DDP, ZeRO-1, ZeRO-2)."""
        return self.gathered_fraction >= 1.0 and not any(group.reshard_after_forward for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class GradPlan:
    """How gradients are averaged and clipped, and when parameters are updated.

    Attributes:
        max_norm: largest global norm of the gradients; larger ones are clipped. ``0.0`` turns clipping off.
        norm_type: p of the p-norm, ``math.inf`` included.
        average: how the backward passes of a step are combined. ``"sum"``: added, as autograd does (the caller divides
            the loss). ``"mean"``: divided by their number. ``"tokens"``: weighted by the ``tokens`` argument of
            ``Session.backward``, which is then required.
        update: ``"step"``: in ``step()``. ``"backward"``: each chunk as soon as its gradient is reduced; gradients are
            not kept, and each step is one backward pass. Not with clipping, a loss scale or ``average="tokens"``.
        over_ranks: ``"mean"`` over data-parallel ranks (token-weighted under ``average="tokens"``), or ``"sum"``. The
            choice also applies to ``.grad``, to norms and to ``max_norm``.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(2).but(max_norm=1.0)
    """

    max_norm: float = 0.0
    norm_type: float = 2.0
    average: Literal["sum", "mean", "tokens"] = "sum"
    update: Literal["step", "backward"] = "step"
    over_ranks: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        number("max_norm", self.max_norm, "[0, inf)", "a finite norm >= 0 (0 is off)")
        number("norm_type", self.norm_type, "(0, inf]", "p > 0, or math.inf")
        require(self.average in ("sum", "mean", "tokens"), f"average={self.average!r}: give 'sum', 'mean' or 'tokens'")
        require(self.update in ("step", "backward"), f"update={self.update!r}: give 'step' or 'backward'")
        require(
            self.update == "step" or self.average != "tokens",
            f"update={self.update!r} with average={self.average!r}: the token weights are known only at the end of a "
            "step; use update='step'",
        )
        require(
            self.update == "step" or self.max_norm == 0.0,
            f"update={self.update!r} with max_norm={self.max_norm}: the gradient norm is known only after the first "
            "gradients have been used; use update='step'",
        )
        require(self.over_ranks in ("mean", "sum"), f"over_ranks={self.over_ranks!r}: give 'mean' or 'sum'")
        require(
            self.over_ranks == "mean" or self.average != "tokens",
            f"over_ranks={self.over_ranks!r} with average={self.average!r}: tokens are weights of a mean; give 'mean'",
        )


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """How ranks communicate.

    Attributes:
        overlap: reduce gradients during backward and gather parameters ahead; ``False``: without overlap.
        shared_memory: use shared memory between CPU ranks of one host; ``None``: if possible.
        gather_on_use: after a step, parameters that stay gathered are gathered in the background and waited for at
            their first use by a module. Until then they show this rank's shard after the step and the other shards
            before it; read and change them inside ``gathered()``. ``False``: ``step()`` gathers them.
        sync_init: every rank starts from rank 0's parameters and buffers, as in DDP.
        same_order: ``None`` or ``True``: gathers are issued in program order, so all ranks must run the same modules in
            the same order; ranks that differ raise an error before anything is updated. ``False``: ranks agree before
            each gather, for models whose ranks take different branches. Gathers through shared memory need neither.
            Gathers from a disk, of secondary shards, and under a declared device capacity are always agreed on.
        wait_timeout_s: seconds that a rank waits for a peer within a pass before it raises an error that says what each
            rank is doing. The first exchange of a pass, and calls such as saving and loading, use the timeout of the
            process group, because one rank may work alone before them.
        predivide: divide gradients by this number before they are summed over ranks, and by ``ranks / predivide``
            afterwards.
        compress: ``"fp8"``: parameters that are trained, gradients, and activations between ranks of one model are sent
            in 8 bits. Masters are kept separately and never rounded.
        compress_weights: ``"fp8"``, ``"int8"`` or ``"int4"`` for trained parameters only (qwZ of ZeRO++); ``None``: as
            for ``compress``.
        compress_gradients: the format for gradients (qgZ), which are rounded once and summed in fp32.
        exchange_bytes: extra bytes for exchange buffers of gradients at stages 2 and 3, beyond two for each class of
            chunk sizes, so that more reductions run at once. ``None``: 16 MiB between hosts without GPUs and without a
            declared capacity, otherwise 0.
        compress_frozen: the format for gathers of parameters that are frozen when the model is sharded (MixZ++); each
            rank keeps its shard unrounded. ``None``, or a dtype that cannot be compressed: sent as it is.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(3).but(compress_weights="int8", wait_timeout_s=300.0)
    """

    overlap: bool = True
    shared_memory: bool | None = None
    gather_on_use: bool = False
    sync_init: bool = True
    same_order: bool | None = None
    wait_timeout_s: float = 60.0
    predivide: float = 1.0
    compress: Literal["fp8"] | None = None
    compress_weights: Literal["fp8", "int8", "int4"] | None = None
    compress_gradients: Literal["fp8", "int8", "int4"] | None = None
    exchange_bytes: int | None = None
    compress_frozen: Literal["fp8", "int8", "int4"] | None = None

    def __post_init__(self) -> None:
        number("predivide", self.predivide, f"[{1 / MOST_DIVISOR!r}, {MOST_DIVISOR!r}]", "a divisor > 0, at most 2**32")
        number("wait_timeout_s", self.wait_timeout_s, f"(0, {MOST_SECONDS!r}]", "seconds > 0, at most ten years")
        check_flags(self)
        for name in ("shared_memory", "same_order"):
            if getattr(self, name) is not None:
                boolean(name, getattr(self, name))
        if self.exchange_bytes is not None:
            integer("exchange_bytes", self.exchange_bytes, 0, MOST_BYTES, "bytes, or None,")
        require(self.compress in (None, "fp8"), f"compress={self.compress!r}: give 'fp8' or None")
        for name in ("compress_weights", "compress_gradients", "compress_frozen"):
            value = getattr(self, name)
            require(value in (None, *BLOCKS), f"{name}={value!r}: give one of {', '.join(map(repr, BLOCKS))}, or None")

    @property
    def weights(self) -> str | None:
        """The format in which trained parameters are sent. ``None`` if they are sent in their own dtype."""
        return self.compress_weights or self.compress

    @property
    def gradients(self) -> str | None:
        """The format in which gradients are sent. ``None`` if they are sent in their own dtype."""
        return self.compress_gradients or self.compress

    @property
    def compressed(self) -> str:
        """The compression settings for messages. Empty if nothing is compressed."""
        fields = ("compress", "compress_weights", "compress_gradients")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in fields if getattr(self, name) is not None)


PARTS = ("mesh", "shard", "precision", "grad", "comm", "tiers", "tensor", "pipeline", "sequence")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of a run. Frozen; :meth:`but` and :func:`dataclasses.replace` return changed copies.

    :func:`zero` and :func:`replicated` make a plan, and so does ``Settings(stage=3).plan()``.

    Attributes:
        mesh: how many ranks there are along each axis.
        shard: how parameters are packed and gathered, and when gradients are reduced.
        precision: dtypes and the loss scale.
        grad: how gradients are averaged and clipped, and when parameters are updated.
        comm: how ranks communicate.
        tiers: in which memory parameters and optimizer state are kept.
        verbose: rank 0 prints skipped steps with the reason.
        tensor: how layers are split over ``tp`` ranks.
        pipeline: how model and batch are divided over ``pp`` ranks.
        sequence: how ``sp`` ranks share sequences.

    Examples:
        >>> from shardwise.plan import zero
        >>> plan = zero(3, torch.bfloat16).but(max_norm=1.0, prefetch=2)
        >>> plan.save("plan.json")
    """

    mesh: MeshPlan
    shard: ShardPlan
    precision: PrecisionPlan
    grad: GradPlan
    comm: CommPlan
    tiers: TierPlan
    verbose: bool = False
    tensor: TensorPlan = dataclasses.field(default_factory=TensorPlan)
    pipeline: PipelinePlan = dataclasses.field(default_factory=PipelinePlan)
    sequence: SequencePlan = dataclasses.field(default_factory=SequencePlan)

    def __post_init__(self) -> None:
        boolean("verbose", self.verbose)
        require(
            not self.comm.compressed or self.tiers.disk is None,
            f"{self.comm.compressed} (fp8_communication) with disk={self.tiers.disk!r:.80}: compressed parameters are "
            "rounded after their update, and data on a disk is not. Offload to the host, or switch compression off",
        )
        require(
            self.grad.update == "step" or self.precision.scaler is None,
            f"update={self.grad.update!r} with a loss scale ({self.precision.scaler!r:.80}): a step that overflows has "
            "to be skipped, but its first gradients have been used by then. Train in bf16, or use update='step'",
        )
        comm, reduce = self.comm, self.shard.reduce
        require(
            not comm.exchange_bytes or (reduce == "every" and comm.overlap),
            f"exchange_bytes={comm.exchange_bytes} with reduce={reduce!r} and overlap={comm.overlap}: it has an effect "
            "only at stages 2 and 3 (reduce='every') with overlap=True; leave it None",
        )
        here = self.tiers.param_host_fraction == self.tiers.param_disk_fraction == 0.0
        require(
            comm.compress_frozen is None or not (self.shard.always_gathered and here),
            f"compress_frozen={comm.compress_frozen!r} with gathered_fraction={self.shard.gathered_fraction}: frozen "
            "parameters stay gathered (stages 0 to 2) and are never sent. Use stage 3, or leave it None",
        )
        secondary, shard, tiers = self.mesh.secondary, self.shard, self.tiers
        require(
            secondary is None or not shard.always_gathered,
            f"secondary={secondary} with gathered_fraction={shard.gathered_fraction}: parameters stay gathered (stages "
            "0 to 2), so backward gathers nothing. Use stage 3, or leave secondary None",
        )
        require(
            secondary is None or tiers.param_disk_fraction == 0.0,
            f"secondary={secondary} with param_disk_fraction={tiers.param_disk_fraction}: the second copy would keep "
            "in memory what is offloaded to a disk. Use param_host_fraction instead, or leave secondary None",
        )
        for axis, part in (("tp", self.tensor), ("pp", self.pipeline), ("sp", self.sequence)):
            settings, size = settings_of(part), getattr(self.mesh, axis)
            require(
                size > 1 or not settings,
                f"{', '.join(settings)} with {axis}={size} has no effect; give {axis} > 1, or leave the default",
            )

    def but(self, **changes: object) -> Plan:
        """Return a copy with fields changed by name, wherever they are: ``plan.but(max_norm=1.0, prefetch=2)``.

        Args:
            changes: fields of the plan or of one of its parts, with their new values.

        Returns:
            The changed plan.

        Raises:
            ValueError: no part of the plan has a field of that name, or two parts have one.

        Examples:
            >>> from shardwise.plan import zero
            >>> plan = zero(3).but(max_norm=1.0, prefetch=2)
            >>> plan.grad.max_norm, plan.shard.prefetch
            (1.0, 2)
        """
        parts = {name: getattr(self, name) for name in PARTS}
        own: dict[str, object] = {}
        inner: dict[str, dict[str, object]] = {}
        for field, value in changes.items():
            holders = [name for name, part in parts.items() if field in part.__dataclass_fields__]
            if field in self.__dataclass_fields__:
                own[field] = value
            elif len(holders) == 1:
                inner.setdefault(holders[0], {})[field] = value
            elif holders:
                raise ValueError(f"{field!r} is a field of {' and '.join(holders)}: replace the whole part in the plan")
            else:
                known = sorted({f for part in parts.values() for f in part.__dataclass_fields__})
                hint = did_you_mean(field, known, f"known fields: {', '.join(known)}", 0.6)
                raise ValueError(f"a plan has no field {field!r}; {hint}")
        changed = {name: replace(parts[name], **values) for name, values in inner.items()}  # at once: some go together
        return replace(self, **(parts | changed | own))

    def __str__(self) -> str:
        """Return every field with its value as TOML, as :meth:`save` writes it."""
        return plan_text.toml(plan_text.to_tables(self, objects=True))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as nested dictionaries of plain values.

        Raises:
            ValueError: a field is an object of the user's program, which has no text form.
        """
        return plan_text.to_tables(self)

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], where: str = "plan") -> Plan:
        """Return the plan that ``tables`` describe.

        The tables have all parts, or ``stage`` (0 to 3), ``dtype`` and the fields that differ from that plan.

        Args:
            tables: a mapping by part and field, as :meth:`to_dict` returns it, or a short one.
            where: what error messages call it.

        Raises:
            ValueError: an unknown or missing field, or an invalid value; the message names it and ``where``.

        Examples:
            >>> from shardwise.plan import Plan
            >>> plan = Plan.from_dict({"stage": 3, "dtype": "bfloat16", "grad": {"max_norm": 1.0}})
        """
        entries = dict(as_mapping(where, tables, "a dict of a plan's fields, such as {'stage': 3}"))
        stage, dtype = entries.pop("stage", None), entries.pop("dtype", None)
        require(dtype is None or stage is not None, f"{where}: dtype={dtype!r} goes with stage = 0, 1, 2 or 3")
        base = None
        if stage is not None:
            require(type(stage) is int and 0 <= stage <= 3, f"{where}: stage={stage!r}: give 0, 1, 2 or 3")
            name = str(dtype).removeprefix("torch.")
            cast = None if dtype in (None, "none") else getattr(torch, name, dtype)
            require(cast is None or cast in (torch.float32, *HALF_DTYPES), f"{where}: dtype={dtype!r}: give 'bfloat16'")
            base = replicated(cast) if stage == 0 else zero(stage, cast)
        for name in entries.keys() - cls.__dataclass_fields__.keys():
            for part in parts_with(name):
                raise ValueError(f"{where}: {name!r} is a field of {part}; write it there")
        return plan_text.from_tables(cls, entries, where, base)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a TOML or JSON file; see :meth:`from_dict`.

        Args:
            path: a ``.toml`` or ``.json`` file.

        Returns:
            The plan.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file does not contain a valid plan; the message has the file, the field and the error.
        """
        return cls.from_dict(plan_text.read(path), os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every field to a file, which :meth:`load` reads as an equal plan.

        Args:
            path: a ``.toml`` or ``.json`` file.

        Examples:
            >>> from shardwise.plan import Plan, zero
            >>> zero(3).save("plan.toml")
            >>> Plan.load("plan.toml") == zero(3)
            True
        """
        plan_text.write(path, self.to_dict())

    def differences(self, other: Plan) -> list[str]:
        """Return how another plan differs.

        Args:
            other: the other plan.

        Returns:
            A line per field.

        Examples:
            >>> from shardwise.plan import zero
            >>> zero(3).differences(zero(3).but(max_norm=1.0))
            ['grad.max_norm: 0.0 -> 1.0']
        """
        if not isinstance(other, Plan):
            raise TypeError(f"other={short_repr(other)}: give a Plan")
        ours, theirs = (plan_text.to_tables(each, objects=True) for each in (self, other))
        return list(plan_text.differences(ours, theirs))


def parts_with(field: str) -> list[str]:
    """Return the names of the parts of a plan that have ``field``."""
    kinds = get_type_hints(Plan)
    return [name for name in PARTS if field in kinds[name].__dataclass_fields__]


def zero(stage: Literal[1, 2, 3], param_dtype: torch.dtype | None = None, dp_replicate: int = 1) -> Plan:
    """Return the plan of ZeRO at a stage over all ranks.

    Stage 3 packs by module, keeps nothing gathered and prefetches one unit. fp16 uses a dynamic loss scale.

    Args:
        stage: 1 shards masters and optimizer state; 2 also gradients; 3 also parameters.
        param_dtype: dtype of parameters and inputs, such as ``torch.bfloat16``; ``None`` does not cast. 16-bit
            parameters have fp32 masters.
        dp_replicate: number of copies of the sharded model (hybrid sharding).

    Examples:
        >>> from shardwise.plan import zero
        >>> session = shardwise.shard(model, optimizer, zero(3, torch.bfloat16).but(max_norm=1.0))
    """
    require(stage in (1, 2, 3), f"stage={stage!r}: give 1, 2 or 3")
    packing: Packing = ByModule(unit_classes=()) if stage == 3 else ByNumel(chunk_numel=8 * 1024**2, min_chunks=8)
    return Plan(
        mesh=MeshPlan(dp_shard=-1, dp_replicate=dp_replicate),
        shard=ShardPlan(
            packing=packing,
            gathered_fraction=0.0 if stage == 3 else 1.0,
            prefetch=1 if stage == 3 else 0,
            reduce="last" if stage == 1 else "every",
        ),
        precision=PrecisionPlan(
            param_dtype=param_dtype,
            cast_inputs=param_dtype is not None,
            scaler=scaler_plan(ScalerArguments()) if param_dtype is torch.float16 else None,
        ),
        grad=GradPlan(),
        comm=CommPlan(),
        tiers=TierPlan(),
    )


def replicated(param_dtype: torch.dtype | None = None) -> Plan:
    """Return the plan of plain data parallelism (DDP): every rank has all parameters, gradients and state.

    Args:
        param_dtype: dtype of parameters and inputs, such as ``torch.bfloat16``; ``None`` does not cast.

    Examples:
        >>> from shardwise.plan import replicated
        >>> session = shardwise.shard(model, optimizer, replicated(torch.bfloat16))
    """
    plan = zero(1, param_dtype)
    return replace(plan, mesh=MeshPlan(dp_shard=1, dp_replicate=-1))
