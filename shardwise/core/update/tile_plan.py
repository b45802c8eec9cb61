"""How a rank's shard of a chunk is divided for the update: pure arithmetic, known before any optimizer state exists.

A *piece* is the part of one parameter in this rank's shard, at most a tile long. A *tile* is a run of neighboring
pieces of one param group that are stepped in one call. If an optimizer needs whole tensors, a piece is one whole
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.shards.layout import ChunkSpec

TILE_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""About the size that stays in a CPU's cache together with its state; on a GPU, large enough to hide launches."""


@dataclass(frozen=True, eq=False)
class ShardRange:
    """Elements ``[start, end)`` of the shard, ``offset`` elements into slot ``slot``'s parameter."""

    slot: int
    param: int
    offset: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class TileRange:
    """Neighboring pieces of param group ``group``; they span ``[start, end)`` of the shard."""

    group: int
    pieces: tuple[ShardRange, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def numel(self) -> int:
        """Number of elements of the shard that the tile spans."""
        return self.end - self.start


def plan_tiles(spec: ChunkSpec, rank: int, group_of: Sequence[int], tile_numel: int) -> list[TileRange]:
    """Return this rank's tiles of a chunk, in order; ``group_of[param]`` is the param group of each parameter."""
    shard_start, shard_end = spec.bounds[rank], spec.bounds[rank + 1]
    tiles: list[TileRange] = []
    run: list[ShardRange] = []
    run_group = -1
    for slot_index, slot in enumerate(spec.slots):
        start, end = max(slot.start, shard_start), min(slot.end, shard_end)
        group = group_of[slot.param]
        step = max(tile_numel, slot.numel) if spec.unsplit else tile_numel
        for at in range(start, end, step):
            stop = min(at + step, end)
            piece = ShardRange(slot_index, slot.param, at - slot.start, at - shard_start, stop - shard_start)
            if run and (group != run_group or piece.end - run[0].start > tile_numel):
                tiles.append(TileRange(run_group, tuple(run)))
                run = []
            run_group = group
            run.append(piece)
    if run:
        tiles.append(TileRange(run_group, tuple(run)))
    return tiles
