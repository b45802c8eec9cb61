"""Where each chunk's data is kept and in which dtypes: one table, made once by a pure function of plan and layout.

:class:`~shardwise.core.engine.allocation.Storage` reads the table and allocates. Nothing decides after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from shardwise.core.base.sizes import size_text
from shardwise.core.comm import FORMATS
from shardwise.core.memory.host import HostArena
from shardwise.core.memory.tier import Home, Tier, assign_homes, missed_shares
from shardwise.core.shards.layout import ChunkSpec, Layout
from shardwise.core.update.tile_plan import TILE_NUMEL, TileRange, plan_tiles
from shardwise.plan import CommPlan, Plan
from shardwise.plan.precision import HALF_DTYPES

ShardMemory = Literal["exchange", "exchange, mapped", "exchange, full", "full", "arena", "disk"]
"""The memory of a parameter shard; see [Note: Which memory a tensor gets]. ``"exchange"``: memory that peers read;
``"mapped"``: next to their shards, so that a gather may be a view; ``"full"``: the full array, on the device."""
GradMemory = Literal["arena", "first use", "ring"]
"""The memory of a gradient shard: from the build on, from its first use on, or lent by a ring for each update during
backward."""


@dataclass(frozen=True)
class Quantization:
    """The format of a chunk in communication.

    Attributes:
        format: name of the format in :data:`FORMATS`.
        by_owner: each update quantizes shards. Otherwise gathers do, and shards keep their values.
    """

    format: str
    by_owner: bool


@dataclass(frozen=True)
class RankFacts:
    """Values of this rank that a placement depends on, in addition to plan and layout.

    Attributes:
        rank, size: this rank and the number of ranks, in the group that shards parameters.
        device_type: ``"cpu"`` or ``"cuda"``.
        secondary: number of ranks that share secondary shards; ``None`` if there are none.
        limited: device memory has a capacity.
        own_classes: class names of parameters that are not plain and may be packed, by index.
    """

    rank: int
    size: int
    device_type: str
    secondary: int | None = None
    limited: bool = False
    own_classes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkPlacement:
    """The memory and the dtypes of the data of one chunk on this rank.

    Attributes:
        spec: the chunk.
        home: tiers of the shard, of masters and optimizer state, and of the gradient shard.
        shard_numel: elements of this rank's shard.
        resident: the full array stays on the device.
        memory: memory of the shard, or of the full array.
        quantization: quantization in communication. ``None`` if the shard is sent as it is.
        secondary_numel: elements of the secondary shard; 0 without one.
        master_dtype: dtype of masters; ``None`` if the update changes the shard itself, because its state has the same
            home.
        reduce_dtype, accumulate_dtype: dtypes in which gradients are reduced, and added up over passes.
        grad_memory: memory of the gradient shard.
        keeps_new_shard: whether updated parameters wait in host memory for ``step()``.
        tiles: tiles in which this rank updates the chunk. Empty if no optimizer has its parameters.
    """

    spec: ChunkSpec
    home: Home
    shard_numel: int
    resident: bool
    memory: ShardMemory
    quantization: Quantization | None
    secondary_numel: int
    master_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    grad_memory: GradMemory
    keeps_new_shard: bool
    tiles: tuple[TileRange, ...]

    @property
    def shard_bytes(self) -> int:
        return self.shard_numel * self.spec.dtype.itemsize

    @property
    def param_bytes(self) -> int:
        """The bytes of the shard, or of the full array of a resident chunk."""
        return self.spec.padded_bytes if self.resident else self.shard_bytes

    @property
    def secondary_bytes(self) -> int:
        return self.secondary_numel * self.spec.dtype.itemsize

    @property
    def arena_bytes(self) -> int:
        """The bytes that the chunk takes from the arena."""
        master, grad = self.master_dtype, self.spec.trainable and self.grad_memory == "arena"
        sizes = [self.shard_bytes, self.secondary_bytes] if self.memory == "arena" else []
        sizes += [self.shard_bytes] if self.keeps_new_shard else []
        sizes += [self.shard_numel * master.itemsize] if master is not None and self.home.state is Tier.HOST else []
        sizes += [self.shard_numel * self.accumulate_dtype.itemsize] if grad else []
        return sum(map(HostArena.rounded, sizes))


@dataclass(frozen=True)
class DiskBuffers:
    """Host buffers of this rank's store; all 0 if it has nothing on a disk.

    Attributes:
        shard_bytes: size of each buffer for shards.
        gathers: buffers for gathers, reads ahead and changes of shards.
        renewals: buffers for shards that updates write during backward, one for each optimizer.
        value_bytes: size of each buffer for the masters of a tile.
        values: buffers for masters. Each optimizer may use them while another updates.
    """

    shard_bytes: int = 0
    gathers: int = 0
    renewals: int = 0
    value_bytes: int = 0
    values: int = 0


@dataclass(frozen=True)
class Placement:
    """The table of one model on this rank.

    Attributes:
        chunks: the chunks, by index.
        disk_buffers: the buffers of the disk store.
        warnings: requests of the plan that the chunks do not allow.
    """

    chunks: tuple[ChunkPlacement, ...]
    disk_buffers: DiskBuffers
    warnings: tuple[str, ...]

    @property
    def on_disk(self) -> bool:
        return any(each.home.on_disk for each in self.chunks)

    def staging(self) -> dict[torch.dtype, int]:
        """Return the elements of the longest shard on a disk, by dtype."""
        numels = dict[torch.dtype, int]()
        for each in self.chunks:
            if each.memory == "disk":
                numels[each.spec.dtype] = max(each.shard_numel, numels.get(each.spec.dtype, 0))
        return numels


def place(plan: Plan, layout: Layout, facts: RankFacts) -> Placement:
    """Return where the data of every chunk is kept on this rank, and in which dtypes."""
    specs, tiers = layout.chunks, plan.tiers
    sizes, trainable = [spec.padded_bytes for spec in specs], [spec.trainable for spec in specs]
    fixed = [spec.reshard_after_forward is False for spec in specs]
    homes = assign_homes(sizes, fixed, tiers, trainable)
    group_of = [info.group for info in layout.facts]
    chunks = tuple(_place(spec, home, plan, facts, group_of) for spec, home in zip(specs, homes, strict=True))
    warnings = missed_shares(sizes, homes, tiers, trainable) + _unquantized(plan.comm, layout, chunks, facts)
    return Placement(chunks, _disk_buffers(plan, chunks), tuple(warnings))


def _place(spec: ChunkSpec, home: Home, plan: Plan, facts: RankFacts, group_of: Sequence[int]) -> ChunkPlacement:
    early = plan.grad.update == "backward"
    reshard = spec.reshard_after_forward
    stays = plan.shard.gathered_fraction >= 1.0 if reshard is None else not reshard
    resident = (stays or facts.size == 1) and home.param is Tier.DEVICE
    quantization = _quantization(spec, resident, plan.comm, facts)
    reduce_dtype = plan.precision.reduce_dtype or spec.dtype
    in_arena = home.grad is Tier.HOST and plan.shard.reduce == "every"
    tile_numel = TILE_NUMEL[facts.device_type if home.state is Tier.DEVICE else "cpu"]
    return ChunkPlacement(
        spec=spec,
        home=home,
        shard_numel=spec.shard_numel(facts.rank),
        resident=resident,
        memory=_shard_memory(spec, home, resident, quantization, facts),
        quantization=quantization,
        secondary_numel=0 if facts.secondary is None or resident else spec.padded_numel // facts.secondary,
        master_dtype=master_dtype(spec, home, plan, quantization),
        reduce_dtype=reduce_dtype,
        accumulate_dtype=plan.precision.accumulate_dtype or reduce_dtype,
        # Plans that keep full gradients need shards only with several reduced passes in one step, which is unusual.
        grad_memory="ring" if early else "arena" if in_arena else "first use",
        keeps_new_shard=early and is_trained(spec) and home.state is Tier.DISK and home.param is not Tier.DISK,
        tiles=tuple(plan_tiles(spec, facts.rank, group_of, tile_numel)) if is_trained(spec) else (),
    )


def is_trained(spec: ChunkSpec) -> bool:
    """Whether an optimizer updates the chunk."""
    return spec.trainable and spec.optimizer >= 0


# [Note: Which memory a tensor gets]
# * Exchange memory of the group, which peers read: shards and resident arrays, if there are peers; on CPU ranks also
#   shards of the host tier. Shards that are gathered and evicted may be neighbors in one mapping, so that a gather is
#   a view of it. This does not apply under a declared capacity, where gathers have to use memory.
# * The arena, one block of host memory, page-locked on request: masters, gradients and shards of the host tier, and new
#   parameters that wait for step(). Its size is known in advance, so that a build that does not fit fails at once.
# * Exchange memory of the smaller group, or the arena: secondary shards, in the tier of the shard. With secondary
#   shards nothing is mapped: gathers are copies.
# * Buffers of the store: data whose home is a disk; see [Note: Buffers of shards on a disk].
# * Device memory: everything else.
def _shard_memory(
    spec: ChunkSpec, home: Home, resident: bool, quantization: Quantization | None, facts: RankFacts
) -> ShardMemory:
    if home.param is Tier.DISK:
        return "disk"
    if home.param is Tier.HOST:
        return "exchange" if facts.size > 1 and facts.device_type == "cpu" else "arena"
    if resident:  # a frozen array is never exchanged
        return "exchange, full" if facts.size > 1 and spec.trainable else "full"
    # Under a capacity gathers have to use memory; gathers that quantize, and secondary shards, are copies.
    by_gather = quantization is not None and not quantization.by_owner
    return "exchange, mapped" if not facts.limited and not by_gather and facts.secondary is None else "exchange"


def master_dtype(spec: ChunkSpec, home: Home, plan: Plan, quantization: Quantization | None) -> torch.dtype | None:
    """Return the dtype of masters; ``None`` for a chunk without masters."""
    if not is_trained(spec):
        return None
    if spec.dtype in HALF_DTYPES and plan.precision.master_weights:
        return torch.float32
    # Parameters that backward still reads must not be updated in place.
    shared = home.param is home.state is not Tier.DISK and plan.grad.update == "step"
    return None if shared and quantization is None else spec.dtype


# [Note: Rounded parameters]
# Where parameters are communicated in 8 bits, all ranks compute with the same quantized values.
# * Trained chunks: every rank, the owner included, has the quantized shard. It is quantized when it is published,
#   always from its master (master_dtype), since quantizing twice with different scales changes values. States and files
#   are made from masters.
# * Frozen chunks have no master. The shard keeps what was loaded, for states and files, and each gather quantizes it,
#   this rank's own part too (Group.dequantized). Resident arrays are never communicated. A chunk with numbers that
#   cannot be quantized (integers, fp64), or with a parameter class of its own, which may be packed weights, is
#   communicated as it is.
# * Chunks that no optimizer trains and that are not frozen are communicated as they are.
# * A secondary shard consists of neighbors' shards as they arrived, and is quantized in the same blocks again.
def _quantization(spec: ChunkSpec, resident: bool, comm: CommPlan, facts: RankFacts) -> Quantization | None:
    if facts.size == 1:
        return None
    if comm.weights is not None and is_trained(spec):
        return Quantization(comm.weights, by_owner=True)
    if not _frozen_and_sent(spec, resident, comm) or any(span.param in facts.own_classes for span in spec.slots):
        return None
    assert comm.compress_frozen is not None
    return Quantization(comm.compress_frozen, by_owner=False)


def _frozen_and_sent(spec: ChunkSpec, resident: bool, comm: CommPlan) -> bool:
    """Whether ``compress_frozen`` refers to the chunk."""
    fmt = comm.compress_frozen
    return fmt is not None and not spec.trainable and not resident and FORMATS[fmt][0].takes(spec.dtype)


def _unquantized(comm: CommPlan, layout: Layout, chunks: Sequence[ChunkPlacement], facts: RankFacts) -> list[str]:
    """Return a warning if parameters with classes of their own keep chunks from being quantized."""
    sent = [each.spec for each in chunks if facts.size > 1 and _frozen_and_sent(each.spec, each.resident, comm)]
    params = [span.param for spec in sent for span in spec.slots if span.param in facts.own_classes]
    if not params:
        return []
    classes = ", ".join(sorted({facts.own_classes[param] for param in params}))
    return [
        f"compress_frozen={comm.compress_frozen!r}: {len(params)} frozen parameters (as "
        f"{layout.facts[params[0]].names[0]!r}) are of classes of their own ({classes}) and may be packed: they, and "
        "what shares a chunk with them, travel as they are"
    ]


def _disk_buffers(plan: Plan, chunks: Sequence[ChunkPlacement]) -> DiskBuffers:
    disk = plan.tiers.disk
    if disk is None or not any(each.home.on_disk for each in chunks):
        return DiskBuffers()
    shards = [each for each in chunks if each.home.param is Tier.DISK]
    masters = [each for each in chunks if is_trained(each.spec) and each.home.state is Tier.DISK]
    renewed = {each.spec.optimizer for each in masters if each.home.param is Tier.DISK}
    renewals = len(renewed) if plan.grad.update == "backward" else 0
    tiles = [(tile, each.master_dtype) for each in masters for tile in each.tiles]
    return DiskBuffers(
        shard_bytes=max((each.shard_bytes for each in shards), default=0),
        # One is in use and one is written, if there are as many; the others are for gathers and reads ahead.
        gathers=max(disk.param_buffers, 2, 1 + renewals) - renewals if shards else 0,
        renewals=renewals,
        value_bytes=max((tile.numel * dtype.itemsize for tile, dtype in tiles if dtype), default=0),
        values=disk.state_buffers * len({each.spec.optimizer for each in masters}) if tiles else 0,
    )


TITLES = ("chunks", "bytes", "shard", "in use", "masters", "state", "gradients", "first unit")


def describe(placement: Placement, layout: Layout) -> str:
    """Return the table as text: one line for chunks with equal placement, with their number and bytes."""
    count, nbytes = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    units = dict[tuple[str, ...], str]()
    for each in placement.chunks:
        kind = _columns(each)
        count[kind] += 1
        nbytes[kind] += each.param_bytes
        units.setdefault(kind, layout.units[each.spec.unit].title)
    rows: list[tuple[str, ...]] = [TITLES]
    rows += [(str(count[kind]), size_text(nbytes[kind]), *kind, units[kind]) for kind in units]
    rows.append((str(count.total()), size_text(nbytes.total()), "total", *[""] * 5))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (zip(row, ">><<<<<<", widths, strict=True) for row in rows)
    return "\n".join("  ".join(f"{text:{side}{width}}" for text, side, width in row).rstrip() for row in cells)


def _columns(each: ChunkPlacement) -> tuple[str, ...]:
    """Return the shard, its use, masters, state and gradients as text."""
    home, master = each.home, each.master_dtype
    use = "resident" if each.resident else "gathered"
    use += f", sent in {each.quantization.format}" if each.quantization is not None else ""
    use += ", secondary shard" if each.secondary_numel else ""
    same = each.accumulate_dtype is each.reduce_dtype
    grads = f"{home.grad.value} {each.accumulate_dtype}" + ("" if same else f", reduced in {each.reduce_dtype}")
    masters = f"{home.state.value} {master}" if master is not None else "-"
    columns = f"{home.param.value} {each.spec.dtype}", use, masters, home.state.value, grads
    shown = (True, True, True, is_trained(each.spec), each.spec.trainable)
    return tuple(text.replace("torch.", "") if show else "-" for text, show in zip(columns, shown, strict=True))
