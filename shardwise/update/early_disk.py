"""Updates during backward of tiles on a disk.

Values and state are written to the version that is not committed, so taking them back costs no copies. The parameters
that follow from them wait until ``step()``: in the host's memory, or, where they are at home on the disk, there too.
A wrong guess costs the transfers of a whole step and wears the disk, so after wrong ones it rests for some steps.

Source: the pipelined optimizer swapper of ZeRO-Infinity (arXiv 2104.07857, section 6.3), begun before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from shardwise.chunk.chunk import Chunk
from shardwise.disk.store import DiskStore
from shardwise.update.disk_tiles import DiskTile, TileVisits
from shardwise.update.tiles import Tile

__all__ = ["EarlyDisk"]

PAUSE_GROWTH, LONGEST_PAUSE = 2, 16  # in steps: k wrong guesses in a row are followed by min(2**k, 16) without one


# The disk's part of [Note: Guesses and their undoing].
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
        self._begun = False
        """Whether something was updated, or half of it, since the last step."""
        self._pause, self._waits = 1, 0
        """Steps, and how many ends of a step are to come before the next guess."""

    def holds(self, chunk: int) -> bool:
        """Whether this rank has tiles of the chunk."""
        return bool(self._tiles.get(chunk))

    @property
    def ready(self) -> bool:
        """Whether a guess may be made. Ranks may differ in it."""
        return not self._waits

    def was_wrong(self) -> None:
        """What was begun is about to be rolled back, and another guess would have been better."""
        if self._begun:
            self._pause = min(self._pause * PAUSE_GROWTH, LONGEST_PAUSE)
            self._waits = 1 + self._pause  # this step's end, too

    def end_step(self) -> None:
        """The gradients of a step were used or dropped."""
        self._waits = max(self._waits - 1, 0)

    def update(self, chunk: Chunk, step: Callable[[Tile, torch.Tensor], None]) -> None:
        """Call ``step`` with each tile of ``chunk``, in memory, and memory for the chunk's new shard.

        Raises:
            DiskError: a transfer failed, not necessarily one of this chunk; :meth:`rollback` is due.
        """
        self._begun = True
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
        if not self._begun:
            return  # what was read ahead is still of use
        self._visits.end_step()
        self._store.rollback(self._owner)
        for restore in reversed(self._undo):
            restore()
        self._undo.clear()
        self._begun = False

    def forget(self) -> None:
        """The step was made, with what was begun and not rolled back."""
        self._undo.clear()
        if self._begun:
            self._pause, self._begun = 1, False
