"""The master weights of chunks, and what a program writes to parameters that have masters.

Where the whole array stays on the device a parameter can be written to at any time (``zero_``, ``clamp_``, weights of
a moving average). The update would start from the master and undo it. So before an update parameters whose version has
moved since the last one are compared with their masters, and what differs goes into these, as in torch. Writes that
move no version (through ``.data``) are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from shardwise.core.base.device import copy_ahead, is_page_locked, record_event
from shardwise.core.base.events import Events
from shardwise.core.base.torch_internals import versions_of
from shardwise.core.base.validate import SHARDED_MODEL
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.core.memory.host import host_block
from shardwise.core.memory.tier import Home, Tier
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import ChunkSpec, ParamSpan
from shardwise.core.update.tile_plan import TileRange

SLOTS, SLOT_BYTES = 2, 1 << 22
"""One is cast into while the other is copied; a tile of fp32."""

PART = 1 << 22
"""Elements that are taken over at a time, to bound what that needs; whole blocks of what is rounded together."""
Rounded = Callable[[torch.Tensor], torch.Tensor]
"""What is shown where a master, in the shard's dtype, has these values, from the beginning of a block on."""


# [Note: Masters apart from parameters]
# The optimizer updates the parameter shard itself, unless something stands against it: 16-bit parameters, which are too
# coarse to add small updates to; a state in another tier, since the update works where the state is; a shard on a disk;
# updates during backward, which still reads the parameters. Then there are masters, in fp32 or in the parameters' own
# dtype (engine/placement.py), and between steps the parameter is what its master rounds to: whoever writes one writes
# the other. What a program writes to a parameter alone is found before the next update (update/masters.py).
class ChunkState:
    """What the optimizer updates for one chunk.

    Args:
        chunk: the chunk.
        home: its tiers.
        dtype: of the masters; ``None``: there are none, the parameter shard itself is updated.
        memory: the masters' memory, where they are in memory.
        events: is told before all masters are read from a disk or written to it, so that whoever has taken buffers in
            advance gives them back.

    Attributes:
        master: this rank's masters, or ``None`` (there are none, or they are on the disk).
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

    @property
    def device(self) -> torch.device:
        """Where updates are computed."""
        return self.chunk.device if self.tier is Tier.DEVICE else torch.device("cpu")

    def use_disk(self, store: DiskStore, ranges: Sequence[TileRange]) -> None:
        """The masters are written to ``store``, one record a tile."""
        self.store, self.ranges = store, ranges
        itemsize = (self.dtype or self.chunk.spec.dtype).itemsize
        name, owner = f"chunk {self.chunk.spec.index}", self.chunk.spec.optimizer
        for r in ranges:
            what = f"master weights of {name}, elements {r.start} to {r.end}"
            self.values.append(store.create(what, (r.end - r.start) * itemsize, owner=owner))

    @contextmanager
    def opened(self, write: bool = False) -> Iterator[torch.Tensor | None]:
        """This rank's masters in memory (``None`` if there are none); with ``write`` changes to them are kept.

        From the disk they come into memory of their own, all at once: for loading, saving and inspection.
        """
        if self.store is None:
            yield self.master
            return
        self._events.masters_wanted(self.chunk.spec.optimizer)
        whole = torch.zeros(self.chunk.shard_numel, dtype=self.dtype, device="cpu")
        if self._written:
            self._transfer(whole, self.store, write=False)
        yield whole
        if write:
            self._transfer(whole, self.store, write=True)
            self._written = True

    def _transfer(self, whole: torch.Tensor, store: DiskStore, write: bool) -> None:
        for record, span in zip(self.values, self.ranges, strict=True):
            part = whole[span.start : span.end]
            buffer = store.buffer(part.nbytes)
            try:
                view = buffer[: part.nbytes].view(whole.dtype)
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
    """Watches the chunks that stay on the device and have masters elsewhere.

    Args:
        chunks: all of one model.
        states: masters, by chunk index.
        rounding: how each is rounded, where it is.
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
        """By chunk index, of its parameters."""

    def _separate(self, optimizer: int | None) -> list[tuple[Chunk, ChunkState]]:
        return [(c, s) for c, s in self._watched if s.dtype is not None and optimizer in (None, c.spec.optimizer)]

    def note(self, optimizer: int | None = None) -> None:
        """The parameters of an optimizer (of all) are what their masters say."""
        for chunk, _ in self._separate(optimizer):
            self._versions[chunk.spec.index] = versions_of(chunk.params)

    def moved(self, optimizer: int | None = None) -> bool:
        """Whether one of these parameters may have been written to since."""
        return any(self._versions[c.spec.index] != versions_of(c.params) for c, _ in self._separate(optimizer))

    @torch.no_grad()
    def take(self) -> None:
        """Take changes over into the masters, this rank its part; what was not changed keeps its precision.

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
                    "their masters are on a disk: make changes inside `with model.gathered(write_back=True)` of "
                    f"{SHARDED_MODEL}"
                )
            self._versions[chunk.spec.index] = versions


def take_over(
    chunk: Chunk,
    shard: torch.Tensor,
    kept: torch.Tensor | None,
    rounded: Rounded | None,
    slots: Sequence[ParamSpan] | None = None,
) -> bool:
    """Changed values go into the master; what was not changed keeps the precision that the shard does not have.

    Args:
        chunk: whose they are.
        shard: what the program has left.
        kept: the master, or the shard itself where another one is shown.
        rounded: what ``kept`` shows, where that is rounded in blocks.
        slots: of the parameters that may have changed; ``None``: all.

    Returns:
        Whether anything was.
    """
    if kept is None:
        return False
    here = [chunk.overlap(slot) for slot in (chunk.spec.slots if slots is None else slots)]
    spans = [(start - chunk.shard_start, end - chunk.shard_start) for start, end in here if start < end]
    changed = False
    for first in range(0, len(shard), PART):
        own = [(max(start - first, 0), end - first) for start, end in spans if first < end and start < first + PART]
        if not own:
            continue
        part = kept[first : first + PART]
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
        if rounded is None:
            continue
        for start, end in own:
            differs[start:end] = differs[start:end].any()
        _show_as_written(values, part, differs, rounded)
    return changed


# [Note: Written to what is rounded]
# A weight that is set to zero may be so small that it had been rounded to that: it does not differ from what is shown.
# Where larger ones of its block are set to zero with it the block's scale shrinks, and it would come back. So in
# parameters that were written to, what can be shown as it was written is shown so. Scales are powers of two: where one
# shrinks all that the block has shown can still be shown, and what would show something else is taken over. Where it
# grows masters round to what is nearest, and are kept; and so are all of parameters that nobody has written to.
def _show_as_written(values: torch.Tensor, part: torch.Tensor, written: torch.Tensor, rounded: Rounded) -> None:
    possible = (rounded(values) == values) & written
    while True:
        differs = possible & (rounded(part.to(values.dtype)) != values)
        if not differs.any():
            return
        part.copy_(torch.where(differs, values.to(part.dtype), part))
        possible &= ~differs
