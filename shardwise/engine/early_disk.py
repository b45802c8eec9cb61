"""Updates during backward of tiles on a disk.

Values and state are written to the version that is not committed, so taking them back costs no copies. The parameters
that follow from them wait until ``step()``: in the host's memory, or, where they are at home on the disk, there too.

Source: the pipelined optimizer swapper of ZeRO-Infinity (arXiv 2104.07857, section 6.3), begun before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from shardwise.chunk.chunk import Chunk
from shardwise.engine.disk_tiles import DiskTile, TileVisits
from shardwise.engine.tiles import Tile
from shardwise.memory.disk import DiskStore

__all__ = ["EarlyDisk"]


class EarlyDisk:
    """The tiles of one optimizer that are on a disk.

    Args:
        tiles: by chunk index.
        visits: brings them into memory.
        new_shards: memory for updated parameters by chunk index, where these are at home in memory.
        store: the disk.
        owner: whose records they are.
    """

    def __init__(
        self,
        tiles: Mapping[int, Sequence[DiskTile]],
        visits: TileVisits,
        new_shards: Mapping[int, torch.Tensor],
        store: DiskStore,
        owner: int,
    ) -> None:
        self._tiles, self._visits, self._new_shards = tiles, visits, new_shards
        self._store, self._owner = store, owner
        self._undo: list[Callable[[], None]] = []

    def holds(self, chunk: int) -> bool:
        """Whether this rank has tiles of the chunk."""
        return bool(self._tiles.get(chunk))

    def update(self, chunk: Chunk, step: Callable[[Tile, torch.Tensor], None]) -> None:
        """Call ``step`` with each tile of ``chunk``, in memory, and memory for the chunk's new shard.

        Raises:
            DiskError: a transfer failed, not necessarily one of this chunk; :meth:`rollback` is due.
        """
        index = chunk.spec.index
        memory = self._new_shards.get(index)
        with chunk.renewing() if memory is None else nullcontext(memory) as shard:
            for each in self._tiles[index]:
                self._undo.append(each.snapshot())
                self._visits.visit(each, lambda one: step(one.tile, shard))

    def drain(self) -> None:
        """Wait until all is written.

        Raises:
            DiskError: it is not.
        """
        self._visits.drain()

    @torch.no_grad()
    def take_over(self, chunk: Chunk) -> None:
        """What was updated counts: renew the parameters. Only their shard; committing is the caller's."""
        memory = self._new_shards.get(chunk.spec.index)
        if memory is None:
            chunk.source.forget()
        else:
            with chunk.opened(write=True) as shard:
                shard.copy_(memory)

    def rollback(self) -> None:
        """Everything is as it was after the last step."""
        self._visits.end_step()
        self._store.rollback(self._owner)
        for restore in reversed(self._undo):
            restore()
        self._undo.clear()

    def forget(self) -> None:
        """The step was made."""
        self._undo.clear()
