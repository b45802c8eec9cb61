"""Allocates parameter shards, masters and gradients of every chunk, as the placement says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from shardwise.core.base.device import runtime, side_stream
from shardwise.core.base.events import Events
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import FORMATS, Buffer, CompressedGroup, Group, collectively, compressed
from shardwise.core.deferred.record import DeferredParameter
from shardwise.core.engine.placement import ChunkPlacement, Placement, RankFacts, ShardMemory, is_trained, place
from shardwise.core.grads.chunk_grads import ChunkGrads, GradRing
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.memory.host import HostArena, host_block
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.mesh import Mesh
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ChunkSpec, Layout
from shardwise.core.shards.shard_memory import DiskSource, MemorySource, ReadAhead, SecondarySource, ShardSource
from shardwise.core.update.master_weights import ChunkState, UploadSlots
from shardwise.plan import Plan

PLAIN = nn.Parameter, DeferredParameter
REMEDY = "Nothing was sharded and no file is left: repair the disk or choose another directory, and build again."


class Storage:
    """The memory of one model on this rank; see [Note: Which memory a tensor gets].

    Collective: every rank allocates the same buffers in the same order.

    Attributes:
        placement: memory and dtypes of each chunk.
        chunks: the chunks, by index.
        states: masters by chunk index, of chunks that an optimizer trains.
        ledger: accounts of device memory.
        uses_disk: whether any rank has something on a disk.
        store: this rank's file on the disk, or ``None``.
        compressed: the groups that quantize the shards of a chunk, by chunk index; see [Note: Rounded parameters].
        new_shards: host memory for parameters that are updated on a disk before ``step()``, by chunk index.
        upload_slots: copy updated masters on the host to shards on the device.

    Raises:
        DiskError: a rank cannot open its file or reserve space (raised on every rank).
        ValueError: the plan wants secondary shards, and the mesh has no groups for them.

    Warns:
        UserWarning: on rank 0, if chunks are too large to meet a fraction, or have parameters that are not quantized.
    """

    def __init__(self, layout: Layout, params: Sequence[nn.Parameter], plan: Plan, mesh: Mesh, events: Events) -> None:
        self.layout, self.mesh, self._events, self._disk_plan = layout, mesh, events, plan.tiers.disk
        self._among = _secondary_group(plan, mesh)
        self.ledger = Ledger(mesh.device, _capacity(plan, mesh.device))
        facts = RankFacts(
            rank=mesh.shard.rank,
            size=mesh.shard.size,
            device_type=mesh.device.type,
            secondary=self._among.size if self._among is not None else None,
            limited=self.ledger.capacity_bytes is not None,
            own_classes={at: type(param).__name__ for at, param in enumerate(params) if type(param) not in PLAIN},
        )
        self.placement: Placement = place(plan, layout, facts)
        table = self.placement.chunks
        for warning in self.placement.warnings if mesh.is_rank0 else ():
            warn_user(warning)
        kinds = {each.spec.index: kind for each in table if (kind := each.quantization) is not None}
        shard = mesh.shard
        groups = {kind: CompressedGroup(shard, FORMATS[kind.format][0], not kind.by_owner) for kind in kinds.values()}
        self.compressed = {index: groups[kind] for index, kind in kinds.items()}
        self.uses_disk = self.on_any_disk(self.placement.on_disk)
        self.store: DiskStore | None = None
        # Host memory is page-locked for the GPU that copies from it.
        self._pin_for = mesh.device if plan.tiers.pin_memory and mesh.device.type == "cuda" else None
        self._rings: dict[Tier, GradRing] = {}
        self._uploads, self.upload_slots = side_stream(mesh.device), UploadSlots()
        try:
            self._open_store()
            self._arena = HostArena(sum(each.arena_bytes for each in table), self._pin_for)
            waiting = [each for each in table if each.keeps_new_shard]
            self.new_shards = {c.spec.index: self._arena.take(c.shard_numel, c.spec.dtype) for c in waiting}
            self.chunks = self._make_chunks(params)
            with self.disk_access("reserving disk space", REMEDY):
                self.states = {each.spec.index: self._make_state(each) for each in table if is_trained(each.spec)}
        except BaseException:
            # Remove the file of a build that failed.
            self.close()
            raise
        self.ledger.account("parameter shards", lambda: self.parameter_bytes(Tier.DEVICE))
        self.ledger.account("secondary shards", lambda: self.secondary_bytes(Tier.DEVICE))

    # ---- the disk

    def _open_store(self) -> None:
        with self.disk_access("creating the disk file", REMEDY):
            if self._disk_plan is not None and self.placement.on_disk:
                allocate = partial(host_block, pin_for=self._pin_for) if self._pin_for is not None else None
                self.store = DiskStore(self._disk_plan, self.mesh.mesh_group.rank, allocate=allocate)
        if self.store is not None:
            buffers = self.placement.disk_buffers
            self.store.reserve(buffers.gathers + buffers.renewals, buffers.shard_bytes)
            self.store.reserve(buffers.values, buffers.value_bytes)

    def on_any_disk(self, own: bool) -> bool:
        """Whether any rank has something on a disk. Data-parallel ranks have the same chunks; with model parallelism
        ranks have different ones, and this is collective."""
        if self.mesh.model_parallel is None or self._disk_plan is None:
            return own
        return any(post[0] for post in self.mesh.mesh_group.exchange([float(own)], "whether anything is on a disk"))

    def disk_access(self, doing: str, outcome: str, group: Group | None = None) -> AbstractContextManager[None]:
        """Return a context for access to disks: if the disk of one rank of ``group`` (``None``: all) fails, all raise.

        Collective over these ranks if any rank uses a disk; see :func:`collectively`.
        """
        return collectively(group or self.mesh.mesh_group, doing, outcome, DiskError, self.uses_disk)

    def commit(self, optimizer: int | None = None) -> None:
        """Commit the writes to the disk: of the records of one optimizer, or of all."""
        if self.store is not None:
            self.store.commit(optimizer)

    def roll_back(self, optimizer: int | None = None) -> None:
        """Drop uncommitted writes to the disk: of the records of one optimizer, or of all."""
        if self.store is not None:
            self.store.rollback(optimizer)

    # ---- parameters

    def by_owner(self, spec: ChunkSpec) -> CompressedGroup | None:
        """Return the group if owners quantize the chunk's shards before they are communicated."""
        over = self.compressed.get(spec.index)
        return None if over is None or over.on_the_way else over

    def rounding(self, spec: ChunkSpec) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the function from a master's values, cast, from the beginning of a block on, to the shard's; ``None``
        if they are equal."""
        over = self.by_owner(spec)
        return None if over is None else over.rounded

    def round_(self, chunk: Chunk) -> None:
        """Quantize the shard to what its peers get, from its current master. See [Note: Rounded parameters]."""
        group = self.by_owner(chunk.spec)
        if group is not None:
            with chunk.opened(write=True) as shard, self.states[chunk.spec.index].opened() as master:
                if master is not None:
                    self.upload_slots.copy(shard, master)
                group.round_(shard)

    def round_full(self, chunk: Chunk) -> None:
        """Quantize the shard as :meth:`round_` does, together with the peers' shards if they are on this rank."""
        group = self.by_owner(chunk.spec)
        if not chunk.resident:
            self.round_(chunk)
        elif group is not None:
            for rank in range(group.size):
                group.round_(group.slice_of(chunk.source.exchange.local, rank))

    def _make_chunks(self, params: Sequence[nn.Parameter]) -> list[Chunk]:
        group, table = self.mesh.shard, self.placement.chunks
        buffers, staging, secondary = self._exchange_buffers(), self._staging(), self._secondary_buffers()
        disk = self.placement.disk_buffers
        ahead = ReadAhead(disk.shard_bytes, disk.gathers, disk.renewals)
        chunks = []
        with self.disk_access("reserving disk space", REMEDY):
            for each in table:
                spec = each.spec
                if each.memory == "disk":
                    source = self._disk_source(each, staging.get(spec.dtype), ahead)
                else:
                    source = self._memory_source(each, buffers.get(spec.index), secondary.get(spec.index))
                own = [params[span.param] for span in spec.slots]
                chunks.append(Chunk(spec, own, source, group.rank, self.mesh.device, each.resident))
        return chunks

    def _exchange_buffers(self) -> dict[int, Buffer]:
        """Allocate what peers read, by chunk. Collective."""
        group, specs = self.mesh.shard, defaultdict[ShardMemory, list[ChunkSpec]](list)
        for each in self.placement.chunks:
            specs[each.memory].append(each.spec)
        full, apart, mapped = specs["exchange, full"], specs["exchange"], specs["exchange, mapped"]
        buffers = group.buffers([(spec.padded_numel, spec.dtype) for spec in full])
        buffers += group.shards([(spec.bounds, spec.dtype) for spec in apart], mapped=False)
        buffers += group.shards([(spec.bounds, spec.dtype) for spec in mapped], mapped=True)
        return {spec.index: buffer for spec, buffer in zip([*full, *apart, *mapped], buffers, strict=True)}

    def _staging(self) -> dict[torch.dtype, Buffer]:
        """Allocate exchange memory for shards that come from the disk, one for each dtype. Collective."""
        numels = self.placement.staging() if self.mesh.shard.size > 1 else {}
        specs = [(numel, dtype) for dtype, numel in numels.items()]
        return dict(zip(numels, self.mesh.shard.buffers(specs), strict=True)) if specs else {}

    def _secondary_buffers(self) -> dict[int, Buffer]:
        """Allocate secondary shards that peers read, by chunk. Collective."""
        if self._among is None:
            return {}
        read = [c for c in self.placement.chunks if c.secondary_numel and c.memory != "arena"]
        buffers = self._among.buffers([(each.secondary_numel, each.spec.dtype) for each in read])
        return {each.spec.index: buffer for each, buffer in zip(read, buffers, strict=True)}

    def _memory_source(self, each: ChunkPlacement, buffer: Buffer | None, secondary: Buffer | None) -> ShardSource:
        """Return the source of a shard in memory. ``buffer`` and ``secondary`` are what peers read, if they do."""
        spec, tier = each.spec, each.home.param
        if each.memory == "full":
            return MemorySource(Buffer(torch.zeros(spec.padded_numel, dtype=spec.dtype, device=self.mesh.device)), tier)
        uploads = self._uploads if buffer is None else None
        buffer = buffer or Buffer(self._arena.take(each.shard_numel, spec.dtype))
        buffer.bounds = spec.shard_offsets
        source = MemorySource(buffer, tier, uploads, self.compressed.get(spec.index))
        if self._among is None or not each.secondary_numel:
            return source
        secondary = secondary or Buffer(self._arena.take(each.secondary_numel, spec.dtype))
        over, few = self.compressed.get(spec.index), self._among
        among = None if over is None else compressed(few, over.format, rows=over.size // few.size)
        return SecondarySource(source, MemorySource(secondary, tier, self._uploads, among), few)

    def _disk_source(self, each: ChunkPlacement, staging: Buffer | None, ahead: ReadAhead) -> ShardSource:
        spec = each.spec
        assert self.store is not None
        record = self.store.create(f"parameters of chunk {spec.index}", each.shard_bytes, owner=spec.optimizer)
        return DiskSource(
            self.store, record, each.shard_numel, spec.dtype, staging, ahead, self.compressed.get(spec.index)
        )

    # ---- masters

    def _make_state(self, each: ChunkPlacement) -> ChunkState:
        dtype, tier = each.master_dtype, each.home.state
        memory = None
        if dtype is not None and tier is Tier.HOST:
            memory = self._arena.take(each.shard_numel, dtype)
        elif dtype is not None and tier is Tier.DEVICE:
            memory = torch.zeros(each.shard_numel, dtype=dtype, device=self.mesh.device)
        state = ChunkState(self.chunks[each.spec.index], each.home, dtype, memory, self._events)
        if tier is Tier.DISK and self.store is not None:
            state.use_disk(self.store, each.tiles)
        return state

    # ---- gradients

    def make_grads(self) -> dict[int, ChunkGrads]:
        """Create the gradient states of the trainable chunks."""
        return {each.spec.index: self._make_grads(each) for each in self.placement.chunks if each.spec.trainable}

    def _make_grads(self, each: ChunkPlacement) -> ChunkGrads:
        tier, numel, dtype = each.home.grad, each.shard_numel, each.accumulate_dtype
        take: Callable[[], torch.Tensor] | None = None
        if each.grad_memory == "arena":
            memory = self._arena.take(numel, dtype)  # its pages are touched at the first use
            take = lambda: memory  # noqa: E731
        elif each.grad_memory == "first use" and tier is Tier.HOST:
            take = partial(torch.empty, numel, dtype=dtype)
        ring = self.ring(tier) if each.grad_memory == "ring" else None
        return ChunkGrads(self.chunks[each.spec.index], each.reduce_dtype, dtype, tier, take, ring)

    def ring(self, home: Tier) -> GradRing:
        """Return the buffers of gradients that stream, in the tier where their updates read them."""
        on_host = home is Tier.HOST
        device = torch.device("cpu") if on_host else self.mesh.device
        return self._rings.setdefault(home, GradRing(device, self._pin_for if on_host else None))

    # ---- accounts

    def parameter_bytes(self, tier: Tier) -> int:
        """Return the bytes of parameter shards and resident arrays in ``tier``."""
        return sum(each.param_bytes for each in self.placement.chunks if each.home.param is tier)

    def secondary_bytes(self, tier: Tier) -> int:
        """Return the bytes of secondary shards in ``tier``."""
        return sum(each.secondary_bytes for each in self.placement.chunks if each.home.param is tier)

    def master_bytes(self, tier: Tier) -> int:
        """Return the bytes of masters in ``tier``."""
        total = 0
        for state in self.states.values():
            if state.tier is tier and state.dtype is not None:
                total += state.chunk.shard_numel * state.dtype.itemsize
        return total

    def close(self) -> None:
        """Close the file on the disk."""
        if self.store is not None:
            self.store.close()


def _secondary_group(plan: Plan, mesh: Mesh) -> Group | None:
    """Return the ranks that share a second copy of parameters; ``None`` if the plan has none beyond the first."""
    secondary, group = plan.mesh.secondary, mesh.secondary
    if secondary is None or secondary == mesh.shard.size:
        return None
    if secondary == "host":
        return group
    if group is None or group.size != secondary:
        raise ValueError(
            f"secondary={secondary}, but the mesh has groups of {group and group.size} ranks for secondary shards: "
            "make the mesh from the same plan (Mesh.create(plan.mesh, ...))"
        )
    return group


def _capacity(plan: Plan, device: torch.device) -> int | None:
    """Return the declared bytes; under ``auto``, those of the device."""
    if plan.tiers.device_capacity_bytes is not None or plan.tiers.auto is None:
        return plan.tiers.device_capacity_bytes
    return runtime().total_bytes(device) if device.type == "cuda" else None
