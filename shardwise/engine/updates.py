"""One update of everything that an optimizer trains on this rank, whichever tier it is in.

What touches a disk comes first, because it can fail: only when all ranks have agreed that it did not, the rest is
updated. So after a failure everything is as it was after the previous step, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch

from shardwise.chunk.chunk import Chunk
from shardwise.engine.disk_tiles import DiskTile, run_tiles
from shardwise.engine.engine import Engine
from shardwise.engine.grads import ChunkGrads
from shardwise.engine.tiles import Tile, TileStepper, make_tiles
from shardwise.memory.disk import DiskError
from shardwise.memory.tier import Tier

__all__ = ["TileUpdates"]

Update = Callable[[Tile, torch.Tensor], None]


class TileUpdates:
    """The tiles of one optimizer.

    Args:
        engine: the model side.
        optimizer: the user's own.
        grads: gradient states of the chunks that it trains.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, grads: Sequence[ChunkGrads]) -> None:
        self._engine, self.optimizer = engine, optimizer
        self.tiles: list[Tile] = []
        self._disk: dict[int, DiskTile] = {}
        """By position among the tiles."""
        for each in grads:
            state = engine.states[each.spec.index]
            tiles = make_tiles(each, state, engine.storage.tile_ranges(each.spec))
            if state.store is not None:
                for tile, record in zip(tiles, state.values, strict=True):
                    self._disk[len(self.tiles)] = DiskTile(tile, state.store, record, optimizer)
                    self.tiles.append(tile)
            else:
                self.tiles += tiles
        self._stepper = TileStepper(optimizer, self.tiles)
        self._roomy = 0
        for disk_tile in self._disk.values():
            disk_tile.make_room = self._make_room
        engine.hold_state(self.state_bytes, self._stepper.scratch_bytes)

    def state_bytes(self, tier: Tier) -> int:
        """Optimizer state at home in ``tier``."""
        return self._stepper.state_bytes(tier)

    def _make_room(self, element_bytes: int) -> None:
        """Buffers for the state of the largest tile, reserved when it is known what the optimizer keeps."""
        disk = self._engine.plan.tiers.disk
        if element_bytes > self._roomy and disk is not None and self._engine.storage.store is not None:
            largest = max(each.tile.end - each.tile.start for each in self._disk.values())
            # Each key's tensors begin on a cache line.
            self._engine.storage.store.reserve(disk.state_buffers, largest * element_bytes + 4096)
            self._roomy = element_bytes

    def opened(self, position: int) -> AbstractContextManager[None]:
        """Inside the block the values and state of the tile at ``position`` can be read."""
        disk_tile = self._disk.get(position)
        return disk_tile.opened() if disk_tile is not None else nullcontext()

    def replace(self, position: int, states: Sequence[dict[str, Any] | None]) -> None:
        """Give the pieces of the tile at ``position`` this state, ``None`` for pieces that were never stepped."""
        disk_tile = self._disk.get(position)
        if disk_tile is not None:
            disk_tile.replace(states)
            return
        for piece, state in zip(self.tiles[position].pieces, states, strict=True):
            self.optimizer.state.pop(piece.value, None)
            if state is not None:
                self.optimizer.state[piece.value] = state

    # ---- an update

    def run(self, factor: float) -> None:
        """Update with ``factor`` times the gradients. Every rank calls it.

        Raises:
            DiskError: on every rank, when the disk of one failed; nothing has changed, and the gradients are kept.
        """
        with self._stepper.stepping(factor) as update:
            if self._disk:
                self._update_disk(update)
            rest = [tile for index, tile in enumerate(self.tiles) if index not in self._disk]
            # Parameters at home on a disk come first: writing them is what may still fail.
            rest.sort(key=lambda tile: tile.chunk.source.tier is not Tier.DISK)
            for chunk, tiles in groupby(rest, key=lambda tile: tile.chunk):
                live = [tile for tile in tiles if self._stepper.live(tile)]
                if live:
                    with chunk.opened(write=True) as shard:
                        for tile in live:
                            update(tile, shard)

    def _update_disk(self, update: Update) -> None:
        live = [each for each in self._disk.values() if self._stepper.live(each.tile)]
        undo = [each.snapshot() for each in live]
        failure: DiskError | None = None
        plan = self._engine.plan.tiers.disk
        try:
            with _shards() as shard_of:
                run_tiles(
                    live,
                    plan.state_buffers if plan is not None else 1,
                    lambda each: update(each.tile, shard_of(each.tile.chunk)),
                )
        except DiskError as error:
            failure = error
        posts = self._engine.mesh.world.exchange([float(failure is None)], "whether the disk took the update")
        if all(post[0] for post in posts):
            return
        self._undo(live, undo)
        if failure is not None:
            raise failure
        ranks = [rank for rank, post in enumerate(posts) if not post[0]]
        raise DiskError(
            f"the disks of ranks {ranks} failed during the update (see their messages); everything is as it was after "
            "the previous step, so that it can be saved"
        )

    def _undo(self, tiles: Sequence[DiskTile], undo: Sequence[Callable[[], None]]) -> None:
        store = self._engine.storage.store
        if store is not None:
            store.rollback()
        for restore in undo:
            restore()
        for each in tiles:
            chunk = each.tile.chunk
            if chunk.source.tier is not Tier.DISK:
                with each.opened(), torch.no_grad():
                    for piece in each.tile.pieces:
                        chunk.shard[piece.start : piece.end].copy_(piece.value)

    def close(self) -> None:
        """Give the user's optimizer its own ``step`` back."""
        self._stepper.close()


@contextmanager
def _shards() -> Iterator[Callable[[Chunk], torch.Tensor]]:
    """A function that opens the shard of the chunk it is asked for, for writing, and closes the one before."""
    stack = ExitStack()
    current: list[tuple[Chunk, torch.Tensor]] = []

    def shard_of(chunk: Chunk) -> torch.Tensor:
        if not current or current[0][0] is not chunk:
            stack.close()
            current[:] = [(chunk, stack.enter_context(chunk.opened(write=True)))]
        return current[0][1]

    with stack:
        yield shard_of
