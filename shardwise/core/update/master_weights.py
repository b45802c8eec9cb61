"""The master weights of chunks, and detection of writes to parameters that have masters.

If the whole array stays on the device, a program can write to a parameter at any time (``zero_``, ``clamp_``, weights
of a moving average). The update starts from the master and would undo the write. So before an update, parameters whose
version has changed since the last one are compared with their masters, and differences are copied to the masters, as in
torch. Writes that do not change the version (through ``.data``) are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from shardwise.core.base.device import copy_ahead, is_page_locked, record_event
from shardwise.core.base.events import Events
from shardwise.core.base.torch_internals import versions_of
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.core.memory.host import host_block
from shardwise.core.memory.tier import Home, Tier
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ChunkSpec, ParamSpan
from shardwise.core.update.tile_plan import TileRange

SLOTS, SLOT_BYTES = 2, 1 << 22
"""Size of one slot: a tile of fp32. The host casts into one slot while the GPU copies the other."""

PART = 1 << 22
"""Elements that are compared at a time, to bound memory; whole blocks of values that are rounded together."""
Rounded = Callable[[torch.Tensor], torch.Tensor]
"""Returns the rounded values of a master, in the shard's dtype, from the beginning of a block on."""


# [Note: Masters apart from parameters]
# The optimizer updates the parameter shard itself, with these exceptions: 16-bit parameters, which are too coarse for
# small updates; a state in another tier, since the update runs where the state is; a shard on a disk; updates during
# backward, which still reads the parameters. In these cases there are masters, in fp32 or in the parameters' own dtype
# (engine/placement.py). Between steps a parameter is its rounded master: code that writes one of them has to write the
# other. What a program writes to a parameter alone is detected before the next update (update/master_weights.py).
class ChunkState:
    """The masters of one chunk, which the optimizer updates.

    Args:
        chunk: the chunk.
        home: the tiers of the state.
        dtype: dtype of the masters. ``None`` if there are no masters, and the parameter shard itself is updated.
        memory: the masters' memory, if they are in memory.
        events: notified before all masters are read from a disk or written to it, so that listeners return buffers that
            they took in advance.

    Attributes:
        master: this rank's masters, or ``None`` if there are no masters or they are on the disk.
        values: the masters' records on the disk, by tile; empty otherwise.
    """

    def __init__(
        self, chunk: Chunk, home: Home, dtype: torch.dtype | None, memory: torch.Tensor | None, events: Events
    ) -> None:
        self.chunk, self.home, self.dtype, self._events = chunk, home, dtype, events
        self.master = memory
        self.store: DiskStore | None = None
        self.values: list[Record] = []
        self.ranges: Sequence[TileRange] = ()
        self._written = False

    @property
    def tier(self) -> Tier:
        return self.home.state

    @property
    def on_disk(self) -> bool:
        return self.store is not None

    def use_disk(self, store: DiskStore, ranges: Sequence[TileRange]) -> None:
        """Write the masters to ``store``, one record for each tile."""
        self.store, self.ranges = store, ranges
        itemsize = (self.dtype or self.chunk.spec.dtype).itemsize
        name, owner = f"chunk {self.chunk.spec.index}", self.chunk.spec.optimizer
        for r in ranges:
            what = f"master weights of {name}, elements {r.start} to {r.end}"
            self.values.append(store.create(what, r.numel * itemsize, owner=owner))

    @contextmanager
    def opened(self, write: bool = False) -> Iterator[torch.Tensor | None]:
        """Return a context with this rank's masters in memory (``None`` without masters); with ``write``, changes are
        kept.

        Masters on a disk are read together into separate memory. Loading, saving and inspection use this.
        """
        if self.store is None:
            yield self.master
            return
        self._events.masters_requested(self.chunk.spec.optimizer)
        masters = torch.zeros(self.chunk.shard_numel, dtype=self.dtype, device="cpu")
        if self._written:
            self._transfer(masters, self.store, write=False)
        yield masters
        if write:
            self._transfer(masters, self.store, write=True)
            self._written = True

    def _transfer(self, masters: torch.Tensor, store: DiskStore, write: bool) -> None:
        for record, span in zip(self.values, self.ranges, strict=True):
            part = masters[span.start : span.end]
            buffer = store.buffer(part.nbytes)
            try:
                view = buffer[: part.nbytes].view(masters.dtype)
                if write:
                    view.copy_(part)
                    store.write(record, buffer).wait()
                else:
                    store.read(record, buffer, newest=True).wait()
                    part.copy_(view)
            finally:
                store.give(buffer)


class UploadSlots:
    """Page-locked memory through which updated values of the host go to shards on a GPU, without a wait of the host.

    The host casts into one slot while the GPU's current stream copies another. In ``step()`` that stream does little
    else, and later work needs no event.
    """

    def __init__(self) -> None:
        self._slots = deque[tuple[torch.Tensor, torch.cuda.Event]]()

    def bytes(self, tier: Tier) -> int:
        """Return the bytes of the slots in ``tier``."""
        return sum(slot.nbytes for slot, _ in self._slots) if tier is Tier.HOST else 0

    def copy(self, shard: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values`` (1-D) to ``shard``, cast to its dtype. If they are in pageable memory, the host waits."""
        if not shard.is_cuda or values.is_cuda or not is_page_locked(values):
            shard.copy_(values)
            return
        numel = SLOT_BYTES // shard.itemsize
        for part, value in zip(torch.split(shard, numel), torch.split(values, numel), strict=True):
            if len(self._slots) < SLOTS:
                slot = host_block(SLOT_BYTES, part.device)
            else:
                slot, read = self._slots.popleft()
                read.synchronize()
            copy_ahead(part, slot[: part.nbytes].view(part.dtype).copy_(value))
            self._slots.append((slot, record_event(part.device)))


class MasterEdits:
    """Detects writes to chunks that stay on the device and have separate masters.

    Args:
        chunks: all of one model.
        states: masters, by chunk index.
        rounding: how each chunk is rounded, if it is.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        states: Mapping[int, ChunkState],
        rounding: Callable[[ChunkSpec], Rounded | None],
    ) -> None:
        self._rounding = rounding
        self._watched = [(c, states[c.spec.index]) for c in chunks if c.resident and c.spec.index in states]
        self._versions: dict[int, list[int]] = {}
        """The last seen versions of the parameters, by chunk index."""

    def _separate(self, optimizer: int | None) -> list[tuple[Chunk, ChunkState]]:
        return [(c, s) for c, s in self._watched if s.dtype is not None and optimizer in (None, c.spec.optimizer)]

    def note(self, optimizer: int | None = None) -> None:
        """Note that the parameters of an optimizer (``None``: all) are equal to their rounded masters."""
        for chunk, _ in self._separate(optimizer):
            self._versions[chunk.spec.index] = versions_of(chunk.params)

    def moved(self, optimizer: int | None = None) -> bool:
        """Return whether a program may have written to one of these parameters since then."""
        return any(self._versions[c.spec.index] != versions_of(c.params) for c, _ in self._separate(optimizer))

    @torch.no_grad()
    def take(self) -> None:
        """Copy changes into the masters of each rank. Unchanged values keep their precision.

        Raises:
            RuntimeError: the masters are on a disk, which needs all ranks.
        """
        for chunk, state in self._separate(None):
            versions, noted = versions_of(chunk.params), self._versions[chunk.spec.index]
            slots = [slot for slot, now, then in zip(chunk.spec.slots, versions, noted, strict=True) if now != then]
            if not slots:
                continue
            with state.opened(write=not state.on_disk) as master:
                changed = take_over(chunk, chunk.shard, master, self._rounding(chunk.spec), slots)
            if changed and state.on_disk:
                raise RuntimeError(
                    f"parameters of chunk {chunk.spec.index} ({chunk.shard_numel} elements) were written to, but "
                    "their masters are on a disk: make changes inside a gathered(write_back=True) block"
                )
            self._versions[chunk.spec.index] = versions


def take_over(
    chunk: Chunk,
    shard: torch.Tensor,
    master: torch.Tensor | None,
    rounded: Rounded | None,
    slots: Sequence[ParamSpan] | None = None,
) -> bool:
    """Copy changed values into the master. Unchanged values keep the precision that the shard does not have.

    Args:
        chunk: the chunk.
        shard: the values that the program has left.
        master: the master, or the shard itself if the parameters show a rounded copy of it.
        rounded: the rounded values of ``master``, if they are rounded in blocks.
        slots: positions of the parameters that may have changed. ``None`` stands for all parameters.

    Returns:
        Whether any value was copied.
    """
    if master is None:
        return False
    here = [chunk.overlap(slot) for slot in (chunk.spec.slots if slots is None else slots)]
    spans = [(start - chunk.shard_start, end - chunk.shard_start) for start, end in here if start < end]
    changed = False
    for first in range(0, len(shard), PART):
        own = [(max(start - first, 0), end - first) for start, end in spans if first < end and start < first + PART]
        if not own:
            continue
        part = master[first : first + PART]
        values = shard[first : first + PART].to(part.device)
        shows = part.to(values.dtype)
        shown = shows if rounded is None else rounded(shows)
        same = (values == shown) | (values.isnan() & shown.isnan())  # a block with an infinite number is all NaN
        differs = torch.zeros_like(same)
        for start, end in own:
            differs[start:end] = ~same[start:end]
        if not differs.any():
            continue
        changed = True
        part.copy_(torch.where(differs, values.to(part.dtype), part))
    return changed
