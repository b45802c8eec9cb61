"""Allocates parameter shards, masters and gradients of every chunk, in the tiers of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from shardwise.core.base.device import side_stream, total_bytes
from shardwise.core.base.events import Events
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import FORMATS, Buffer, CompressedGroup, Group, collectively, compressed
from shardwise.core.deferred.record import DeferredParameter
from shardwise.core.grads.grads import ChunkGrads, GradRing
from shardwise.core.memory.disk.store import DiskError, DiskStore
from shardwise.core.memory.host import HostArena, host_block
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Home, Tier, assign_homes, missed_shares
from shardwise.core.mesh import Mesh
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ChunkSpec, Layout
from shardwise.core.shards.source import DiskSource, MemorySource, ReadAhead, SecondarySource, ShardSource
from shardwise.core.update.masters import ChunkState
from shardwise.core.update.tile_plan import TILE_NUMEL, TileRange, plan_tiles
from shardwise.plan import Plan
from shardwise.plan.precision import HALF_DTYPES

__all__ = ["CommDtypes", "Storage", "trained"]

REMEDY = "Nothing was sharded and no file is left: repair the disk or choose another directory, and build again."


# [Note: Which memory a tensor gets]
# * Exchange memory of the group, which peers read: shards and resident arrays, if there are peers; on CPU ranks also
#   shards of the host tier. Shards that are gathered and evicted may be neighbours in one mapping (joint), so that a
#   gather is a view of it; not under a declared capacity, where gathers have to take room.
# * The arena, one block of host memory, page-locked on request: masters, gradients and shards of the host tier, and new
#   parameters that wait for step(). Its size is known before, so that a build that does not fit fails at once.
# * Exchange memory of the smaller group, or the arena: secondary shards, in the tier of the shard. With them nothing is
#   joint: gathers are copies.
# * Buffers of the store: what is at home on a disk; see [Note: Buffers of shards on a disk].
# * Device memory: the rest.
# Every rank allocates the same buffers in the same order, since this is collective.
class Storage:
    """The memory of one model on this rank. Collective.

    Attributes:
        chunks: by index.
        states: masters by chunk index, of chunks that an optimizer trains.
        homes: tiers by chunk index.
        ledger: accounts of device memory.
        uses_disk: whether any rank has something on a disk.
        store: this rank's file on the disk, or ``None``.
        value_buffer_bytes: size of the store's buffers for the values of tiles.
        comm_dtypes: chunks that are quantized for communication.
        new_shards: by chunk index, host memory for parameters that are updated on a disk before ``step()``.

    Raises:
        DiskError: on every rank, if one cannot open its file or reserve space.
        ValueError: the plan wants secondary shards, and the mesh has no groups for them.

    Warns:
        UserWarning: on rank 0, if chunks are too large to meet a fraction.
    """

    def __init__(self, layout: Layout, params: Sequence[nn.Parameter], plan: Plan, mesh: Mesh, events: Events) -> None:
        self.layout, self.plan, self.mesh, self._events = layout, plan, mesh, events
        self._among = _secondary_group(plan, mesh)
        specs = layout.chunks
        sizes, fixed = [s.padded_bytes for s in specs], [s.persistent for s in specs]
        trainable = [s.trainable for s in specs]
        self.homes: list[Home] = assign_homes(sizes, fixed, plan.tiers, trainable)
        for missed in missed_shares(sizes, self.homes, plan.tiers, trainable) if mesh.is_rank0 else ():
            warn_user(missed)
        self.comm_dtypes = CommDtypes(layout, params, plan, mesh.shard, self._among, self._resident)
        if self.comm_dtypes.left and mesh.is_rank0:
            first, kinds = self.comm_dtypes.left[0], {type(params[index]).__name__ for index in self.comm_dtypes.left}
            warn_user(
                f"compress_frozen={plan.comm.compress_frozen!r}: {len(self.comm_dtypes.left)} frozen parameters (as "
                f"{layout.facts[first].names[0]!r}) are of classes of their own ({', '.join(sorted(kinds))}) and may "
                "be packed: they, and what shares a chunk with them, travel as they are"
            )
        self.ledger = Ledger(mesh.device, _capacity(plan, mesh.device))
        self._own_disk = any(Tier.DISK in (home.param, home.state) for home in self.homes)
        self.uses_disk = self.on_any_disk(self._own_disk)
        self.store: DiskStore | None = None
        self.value_buffer_bytes = 0
        self._rings: dict[Tier, GradRing] = {}
        self._uploads = side_stream(mesh.device)
        try:
            self._open_store()
            self._arena = HostArena(self._host_bytes(), self._pins_for)
            self.new_shards = {s.index: self._arena.take(self._own(s), s.dtype) for s in specs if self._waits(s)}
            self.chunks = self._make_chunks(params)
            with self._all_reserve():
                self.states = {s.index: self._make_state(self.chunks[s.index]) for s in specs if trained(s)}
        except BaseException:
            # Remove the file of a build that failed.
            self.close()
            raise
        self.ledger.account("parameter shards", lambda: self.parameter_bytes(Tier.DEVICE))
        self.ledger.account("secondary shards", lambda: self.secondary_bytes(Tier.DEVICE))

    # ---- the disk

    def _open_store(self) -> None:
        disk = self.plan.tiers.disk
        with collectively(self.mesh.mesh_group, "creating the disk file", REMEDY, DiskError, self.uses_disk):
            allocate = partial(host_block, pin_for=self._pins_for) if self._pins_for is not None else None
            disk = disk if self._own_disk else None
            self.store = DiskStore(disk, self.mesh.mesh_group.rank, allocate=allocate) if disk is not None else None
        shards = [s for s in self.layout.chunks if self.homes[s.index].param is Tier.DISK]
        largest = max((self._own(s) * s.dtype.itemsize for s in shards), default=0)
        # One buffer for each optimizer that writes new shards beside gathers.
        early = {s.optimizer for s in shards if trained(s) and self.homes[s.index].state is Tier.DISK}
        renewals = len(early) if self.plan.grad.update == "backward" else 0
        count = max(disk.param_buffers, 2, 1 + renewals) if disk is not None else 0
        # Of the others one is in use and one is written, if there are as many; the rest gathers and reads ahead.
        self._ahead = ReadAhead(largest, count - renewals, renewals)

    def on_any_disk(self, own: bool) -> bool:
        """Whether any rank has something on a disk. Data-parallel ranks have the same chunks; with model parallelism
        ranks have different ones, and this is collective."""
        if self.mesh.model_parallel is None or self.plan.tiers.disk is None:
            return own
        posts = self.mesh.mesh_group.exchange([float(own)], "whether anything is on a disk")
        return any(post[0] for post in posts)

    def _all_reserve(self) -> AbstractContextManager[None]:
        return collectively(self.mesh.mesh_group, "reserving disk space", REMEDY, DiskError, self.uses_disk)

    def roll_back(self) -> None:
        """Drop what was written to the disk and not committed."""
        if self.store is not None:
            self.store.rollback()

    @property
    def _pins_for(self) -> torch.device | None:
        """The GPU that host memory is page-locked for, so that copies are direct."""
        device = self.mesh.device
        return device if self.plan.tiers.pin_memory and device.type == "cuda" else None

    # ---- which memory

    def _resident(self, spec: ChunkSpec) -> bool:
        """Whether the full array stays on the device."""
        stays = self.plan.shard.always_gathered or spec.persistent or self.mesh.shard.size == 1
        return stays and self.homes[spec.index].param is Tier.DEVICE

    def round_(self, chunk: Chunk) -> None:
        """Quantize the shard to what its peers get, from its current master. See [Note: Rounded parameters]."""
        if self.comm_dtypes.rounds(chunk.spec):
            with chunk.opened(write=True) as shard, self.states[chunk.spec.index].opened() as master:
                if master is not None:
                    shard.copy_(master)
                self.comm_dtypes.trained.round_(shard)

    def round_whole(self, chunk: Chunk) -> None:
        """As :meth:`round_`, with the peers' shards if they are here."""
        if not chunk.resident:
            self.round_(chunk)
        elif self.comm_dtypes.rounds(chunk.spec):
            group = self.comm_dtypes.trained
            for rank in range(group.size):
                group.round_(group.slice_of(chunk.exchange.local, rank))

    def master_dtype(self, spec: ChunkSpec) -> torch.dtype | None:
        """Return the dtype of masters; ``None`` if the shard itself is updated, because its state has the same home."""
        home = self.homes[spec.index]
        if not trained(spec):
            return None
        if spec.dtype in HALF_DTYPES and self.plan.precision.master_weights:
            return torch.float32
        # Parameters that backward still reads cannot be updated themselves.
        shared = home.param is home.state and home.param is not Tier.DISK and self.plan.grad.update == "step"
        return None if shared and not self.comm_dtypes.rounds(spec) else spec.dtype

    def _waits(self, spec: ChunkSpec) -> bool:
        """Whether new parameters need separate memory between their update and ``step()``."""
        home = self.homes[spec.index]
        on_disk = home.state is Tier.DISK and home.param is not Tier.DISK
        return trained(spec) and on_disk and self.plan.grad.update == "backward"

    @property
    def _keeps_whole(self) -> bool:
        """Whether full gradients stay on the device until the step."""
        return self.plan.shard.reduce == "last"

    def _host_bytes(self) -> int:
        """Return the size of the arena. CPU ranks keep host shards in the group's exchange memory instead."""
        total = 0
        for spec, home in zip(self.layout.chunks, self.homes, strict=True):
            master = self.master_dtype(spec)
            if home.state is Tier.HOST and master is not None:
                total += HostArena.rounded(self._own(spec) * master.itemsize)
            kept = self.plan.grad.update == "step" and not self._keeps_whole
            if home.grad is Tier.HOST and spec.trainable and kept:
                total += HostArena.rounded(self._own(spec) * self.grad_dtypes(spec)[1].itemsize)
            in_arena = home.param is Tier.HOST and not self._exchanged(spec)
            needed = int(in_arena) + int(self._waits(spec))
            total += needed * HostArena.rounded(self._own(spec) * spec.dtype.itemsize)
            total += HostArena.rounded(self._secondary_numel(spec) * spec.dtype.itemsize) if in_arena else 0
        return total

    def grad_dtypes(self, spec: ChunkSpec) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes in which gradients are reduced and accumulated."""
        precision = self.plan.precision
        travel = precision.reduce_dtype or spec.dtype
        return travel, precision.accumulate_dtype or travel

    # ---- parameters

    def _own(self, spec: ChunkSpec) -> int:
        """Return the number of elements of this rank's shard."""
        return spec.shard_numel(self.mesh.shard.rank)

    def _exchanged(self, spec: ChunkSpec) -> bool:
        """Whether the chunk needs exchange memory of the group."""
        group, home = self.mesh.shard, self.homes[spec.index]
        if group.size == 1 or home.param is Tier.DISK:
            return False
        if home.param is Tier.HOST:
            return self.mesh.device.type == "cpu"
        # A frozen resident chunk is never exchanged: plain memory will do.
        return spec.trainable or not self._resident(spec)

    def _joint(self, spec: ChunkSpec) -> bool:
        """Whether the ranks' shards may be mapped as one array; not under a declared capacity."""
        in_place = self.homes[spec.index].param is Tier.DEVICE and self.ledger.capacity_bytes is None
        in_place = in_place and not self.comm_dtypes.rounds_on_the_way(spec)
        return in_place and not self._resident(spec) and self._among is None

    def _secondary_numel(self, spec: ChunkSpec) -> int:
        """Return the number of elements of the chunk's secondary shard; 0 if it has none."""
        return 0 if self._among is None or self._resident(spec) else spec.padded_numel // self._among.size

    def _secondary_buffers(self) -> dict[int, Buffer]:
        """Allocate secondary shards, by chunk."""
        if self._among is None:
            return {}
        kept = [s for s in self.layout.chunks if self._secondary_numel(s)]
        exchanged = [s for s in kept if self._exchanged(s)]
        buffers = self._among.buffers([(self._secondary_numel(s), s.dtype) for s in exchanged])
        found = dict(zip([s.index for s in exchanged], buffers, strict=True))
        apart = [s for s in kept if s.index not in found]
        return found | {s.index: Buffer(self._arena.take(self._secondary_numel(s), s.dtype)) for s in apart}

    def _make_chunks(self, params: Sequence[nn.Parameter]) -> list[Chunk]:
        group = self.mesh.shard
        wanted = [s for s in self.layout.chunks if self._exchanged(s)]
        joint = [s for s in wanted if self._joint(s)]
        apart = [s for s in wanted if not self._joint(s) and not self._resident(s)]
        full = [s for s in wanted if self._resident(s)]
        made = group.buffers([(s.padded_numel, s.dtype) for s in full])
        made += group.shards([(s.bounds, s.dtype) for s in apart], joint=False)
        made += group.shards([(s.bounds, s.dtype) for s in joint], joint=True)
        buffers = dict[int, Buffer]()
        for spec, buffer in zip([*full, *apart, *joint], made, strict=True):
            buffer.bounds, buffers[spec.index] = spec.shard_offsets, buffer
        staging, secondary = self._staging(), self._secondary_buffers()
        self._reserve_disk_buffers()
        chunks = []
        with self._all_reserve():
            for spec in self.layout.chunks:
                source = self._source(spec, buffers.get(spec.index), staging.get(spec.dtype))
                if self._among is not None and spec.index in secondary and isinstance(source, MemorySource):
                    few = self.comm_dtypes.over_few(spec)
                    kept = MemorySource(secondary[spec.index], source.tier, self._uploads, few)
                    source = SecondarySource(source, kept, self._among)
                held = [params[s.param] for s in spec.slots]
                chunks.append(Chunk(spec, held, source, group.rank, self.mesh.device, self._resident(spec)))
        return chunks

    def _staging(self) -> dict[torch.dtype, Buffer]:
        """Allocate exchange memory for shards that come from the disk, one for each dtype."""
        on_disk = [s for s in self.layout.chunks if self.homes[s.index].param is Tier.DISK]
        if self.mesh.shard.size == 1 or not on_disk:
            return {}
        dtypes = list(dict.fromkeys(s.dtype for s in on_disk))
        sizes = [(max(self._own(s) for s in on_disk if s.dtype is dtype), dtype) for dtype in dtypes]
        return dict(zip(dtypes, self.mesh.shard.buffers(sizes), strict=True))

    def _reserve_disk_buffers(self) -> None:
        disk = self.plan.tiers.disk
        if self.store is None or disk is None:
            return
        if any(home.param is Tier.DISK for home in self.homes):
            self.store.reserve(self._ahead.buffers + self._ahead.renewals, self._ahead.buffer_bytes)
        sizes, optimizers = [0], set()
        for spec in self.layout.chunks:
            if self.homes[spec.index].state is Tier.DISK and trained(spec):
                itemsize = (self.master_dtype(spec) or spec.dtype).itemsize
                sizes += [(r.end - r.start) * itemsize for r in self.tile_ranges(spec)]
                optimizers.add(spec.optimizer)
        self.value_buffer_bytes = max(sizes)
        if self.value_buffer_bytes:
            # Each optimizer may hold tiles while another is updated.
            self.store.reserve(disk.state_buffers * len(optimizers), self.value_buffer_bytes)

    def _source(self, spec: ChunkSpec, buffer: Buffer | None, staging: Buffer | None) -> ShardSource:
        tier, over = self.homes[spec.index].param, self.comm_dtypes.over(spec)
        if buffer is not None:
            return MemorySource(buffer, tier, over=over)
        if tier is Tier.HOST:
            kept = Buffer(self._arena.take(self._own(spec), spec.dtype))
            kept.bounds = spec.shard_offsets
            return MemorySource(kept, tier, self._uploads, over)
        if tier is Tier.DISK:
            return self._disk_source(spec, staging, over)
        return MemorySource(Buffer(torch.zeros(spec.padded_numel, dtype=spec.dtype, device=self.mesh.device)), tier)

    def _disk_source(self, spec: ChunkSpec, staging: Buffer | None, over: Group | None) -> ShardSource:
        if self.store is None:
            raise RuntimeError(f"chunk {spec.index} is at home on a disk without a store ({self.store}); report this")
        nbytes = self._own(spec) * spec.dtype.itemsize
        record = self.store.create(f"parameters of chunk {spec.index}", nbytes, owner=spec.optimizer)
        return DiskSource(self.store, record, self._own(spec), spec.dtype, staging, self._ahead, over)

    # ---- masters

    def tile_ranges(self, spec: ChunkSpec) -> list[TileRange]:
        """Return the tiles in which this rank updates the chunk."""
        on_device = self.homes[spec.index].state is Tier.DEVICE
        numel = TILE_NUMEL[self.mesh.device.type if on_device else "cpu"]
        return plan_tiles(spec, self.mesh.shard.rank, [fact.group for fact in self.layout.facts], numel)

    def _make_state(self, chunk: Chunk) -> ChunkState:
        spec, home = chunk.spec, self.homes[chunk.spec.index]
        dtype = self.master_dtype(spec)
        memory = None
        if dtype is not None and home.state is not Tier.DISK:
            if home.state is Tier.HOST:
                memory = self._arena.take(self._own(spec), dtype)
            else:
                memory = torch.zeros(self._own(spec), dtype=dtype, device=self.mesh.device)
        state = ChunkState(chunk, home, dtype, memory, self._events)
        if home.state is Tier.DISK and self.store is not None:
            state.use_disk(self.store, self.tile_ranges(spec))
        return state

    # ---- gradients

    def make_grads(self) -> dict[int, ChunkGrads]:
        """Create the gradient states of the trainable chunks."""
        return {chunk.spec.index: self._make_grads(chunk) for chunk in self.chunks if chunk.spec.trainable}

    def _make_grads(self, chunk: Chunk) -> ChunkGrads:
        travel, accumulate = self.grad_dtypes(chunk.spec)
        home = self.homes[chunk.spec.index].grad
        take: Callable[[], torch.Tensor] | None = None
        if self.plan.grad.update == "backward":
            return ChunkGrads(chunk, travel, accumulate, home, None, self.ring(home))
        if home is Tier.HOST and self._keeps_whole:
            # Needed only with several reduced passes in one step, which is unusual for such a plan.
            take = partial(torch.empty, chunk.shard_numel, dtype=accumulate)
        elif home is Tier.HOST:
            # Taken now, since the arena's size was computed with it; its pages are touched at the first use.
            memory = self._arena.take(chunk.shard_numel, accumulate)
            take = lambda: memory  # noqa: E731
        return ChunkGrads(chunk, travel, accumulate, home, take)

    def ring(self, home: Tier) -> GradRing:
        """Return the buffers of gradients that stream, in the tier where their updates read them."""
        on_host = home is Tier.HOST
        device = torch.device("cpu") if on_host else self.mesh.device
        return self._rings.setdefault(home, GradRing(device, self._pins_for if on_host else None))

    # ---- accounts

    def parameter_bytes(self, tier: Tier) -> int:
        """Return the bytes of parameter shards and resident arrays in ``tier``."""
        total = 0
        for chunk in self.chunks:
            if chunk.source.tier is tier:
                shard_bytes = chunk.shard_numel * chunk.spec.dtype.itemsize
                total += shard_bytes if tier is Tier.DISK else chunk.exchange.local.nbytes
        return total

    def secondary_bytes(self, tier: Tier) -> int:
        """Return the bytes of secondary shards in ``tier``."""
        sources = [chunk.source for chunk in self.chunks if chunk.source.tier is tier]
        return sum(each.kept.exchange.local.nbytes for each in sources if isinstance(each, SecondarySource))

    def master_bytes(self, tier: Tier) -> int:
        """Return the bytes of masters in ``tier``."""
        total = 0
        for state in self.states.values():
            if state.tier is tier and state.dtype is not None:
                total += state.chunk.shard_numel * state.dtype.itemsize
        return total

    def new_shard_bytes(self, tier: Tier) -> int:
        """Return the bytes of :attr:`new_shards` in ``tier``."""
        return sum(memory.nbytes for memory in self.new_shards.values()) if tier is Tier.HOST else 0

    def close(self) -> None:
        """Close the file on the disk."""
        if self.store is not None:
            self.store.close()


def _secondary_group(plan: Plan, mesh: Mesh) -> Group | None:
    """Return the ranks that share a second copy of parameters; ``None`` if the plan has none beyond the first."""
    wanted, group = plan.mesh.secondary, mesh.secondary
    if wanted is None or wanted == mesh.shard.size:
        return None
    if wanted == "host":
        return group
    if group is None or group.size != wanted:
        raise ValueError(
            f"secondary={wanted}, but the mesh has groups of {group and group.size} ranks for secondary shards: make "
            "the mesh from the same plan (Mesh.create(plan.mesh, ...))"
        )
    return group


def _capacity(plan: Plan, device: torch.device) -> int | None:
    """Return the declared bytes; under ``auto``, those of the device."""
    if plan.tiers.device_capacity_bytes is not None or plan.tiers.auto is None:
        return plan.tiers.device_capacity_bytes
    if device.type == "cuda":
        return total_bytes(device)
    return None


PLAIN = nn.Parameter, DeferredParameter


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
# * A secondary shard consists of neighbours' shards as they arrived, and is quantized in the same blocks again.
class CommDtypes:
    """Which chunks are quantized for communication, and by which groups.

    Args:
        layout: of the parameters.
        params: the parameters.
        plan: see :class:`~shardwise.plan.CommPlan`.
        shard: the ranks that shard parameters.
        among: the ranks that share secondary shards.
        resident: whether a chunk stays unsharded on the device.

    Attributes:
        trained: the group for trained shards; ``shard`` if they are not quantized.
        left: indices of frozen parameters with classes of their own, whose chunks are not quantized.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[nn.Parameter],
        plan: Plan,
        shard: Group,
        among: Group | None,
        resident: Callable[[ChunkSpec], bool],
    ) -> None:
        weights, frozen = plan.comm.weights, plan.comm.compress_frozen
        self._shard, self._among = shard, among
        self.trained = shard if weights is None else compressed(shard, FORMATS[weights][0])
        self._frozen = shard if frozen is None else compressed(shard, FORMATS[frozen][0], on_the_way=True)
        own = dict[int, list[int]]()
        if frozen is not None and shard.size > 1:
            for spec in layout.chunks:
                if not spec.trainable and not resident(spec) and FORMATS[frozen][0].takes(spec.dtype):
                    own[spec.index] = [slot.param for slot in spec.slots if type(params[slot.param]) not in PLAIN]
        self._on_the_way = frozenset(index for index, others in own.items() if not others)
        self.left = [param for others in own.values() for param in others]

    def rounds(self, spec: ChunkSpec) -> bool:
        """Whether owners quantize the chunk's shards before they are communicated."""
        return self.trained is not self._shard and trained(spec)

    def rounds_on_the_way(self, spec: ChunkSpec) -> bool:
        """Whether gathers quantize the chunk."""
        return spec.index in self._on_the_way

    def over(self, spec: ChunkSpec) -> Group | None:
        """Return the group that quantizes the chunk's shards; ``None`` if they are not quantized."""
        if self.rounds_on_the_way(spec):
            return self._frozen
        return self.trained if self.rounds(spec) else None

    def over_few(self, spec: ChunkSpec) -> Group | None:
        """Return the same for its secondary shards."""
        over, few = self.over(spec), self._among
        if few is None or not isinstance(over, CompressedGroup):
            return None
        return compressed(few, over.format, rows=over.size // few.size)

    def rounding(self, spec: ChunkSpec) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the function from a master's values, cast, from the beginning of a block on, to the shard's; ``None``
        if they are equal."""
        return self.trained.rounded if self.rounds(spec) else None


def trained(spec: ChunkSpec) -> bool:
    """Whether an optimizer updates the chunk."""
    return spec.trainable and spec.optimizer >= 0
