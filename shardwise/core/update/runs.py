"""Which tiles one call of the optimizer steps: of small chunks many at once.

A call costs the host what some ten thousand elements cost a processor, and a GPU a kernel for each chunk; so small
tiles are stepped together, up to what one tile may have. Each parameter gets what it would get alone: only optimizers
that are known to treat each by itself are asked so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch

from shardwise.core.memory.tier import Tier
from shardwise.core.update.tile_plan import TILE_NUMEL
from shardwise.core.update.tiles import Tile

__all__ = ["Calls", "chunks_at_once", "runs"]

Kind = tuple[Tier, torch.device, torch.dtype, torch.dtype, torch.dtype]


def chunks_at_once(tiles: Iterable[Tile]) -> Iterator[list[Tile]]:
    """Tiles of neighbouring chunks that are alike and have no more elements than one tile may have; or of one chunk."""
    held, numel = list[Tile](), 0
    kind: Kind | None = None
    for _, of_chunk in groupby(tiles, key=lambda tile: tile.chunk):
        own = list(of_chunk)
        more, its = sum([tile.numel for tile in own]), _kind(own[0])
        if held and (its != kind or numel + more > _most(own[0])):
            yield held
            held, numel = [], 0
        held += own
        numel, kind = numel + more, its
    if held:
        yield held


def runs(tiles: Sequence[Tile], together: bool = True) -> Iterator[list[Tile]]:
    """``tiles``, which are alike, by param group, as many in one call as one tile may have elements.

    Args:
        together: ``False``: each by itself.
    """
    if not together:
        yield from ([tile] for tile in tiles)
        return
    most = _most(tiles[0])
    held = dict[int, tuple[list[Tile], int]]()
    for tile in tiles:
        run, numel = held.get(tile.group, ([], 0))
        if run and numel + tile.numel > most:
            yield run
            run, numel = [], 0
        run.append(tile)
        held[tile.group] = run, numel + tile.numel
    for run, _ in held.values():
        yield run


class Calls:
    """Which tiles each call of an update steps: as for the update before, if the same are due.

    Args:
        together: as for :func:`runs`.
    """

    def __init__(self, together: bool) -> None:
        self._together = together
        self._due = list[Tile]()
        self._calls = list[list[Tile]]()

    def of(self, due: list[Tile]) -> Sequence[list[Tile]]:
        """The calls that step ``due``, in order."""
        if due != self._due:  # each of these is equal to itself alone
            self._due = due
            self._calls = [run for tiles in chunks_at_once(due) for run in runs(tiles, self._together)]
        return self._calls

    def forget(self) -> None:
        """Tiles have another home, and so are alike with others."""
        self._due, self._calls = [], []


def _most(tile: Tile) -> int:
    return TILE_NUMEL[tile.pieces[0].value.device.type]


def _kind(tile: Tile) -> Kind:
    value, grads = tile.pieces[0].value, tile.grads
    return tile.state.tier, value.device, value.dtype, grads.dtype, grads.accumulate_dtype
