"""The master weights of one chunk, wherever they are at home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.core.base.events import Events
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.core.memory.placement import Home
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.chunk import Chunk
from shardwise.core.update.tile_plan import TileRange

__all__ = ["ChunkState"]


# [Note: Masters apart from parameters]
# The optimizer updates the parameter shard itself, unless something stands against it: 16-bit parameters, which are too
# coarse to add small updates to; a state in another tier, since the update works where the state is; a shard on a disk;
# updates during backward, which still reads the parameters. Then there are masters, in fp32 or in the parameters' own
# dtype (Storage.master_dtype), and between steps the parameter is what its master rounds to: whoever writes one writes
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
