"""Masters and optimizer state of the device that wait in host memory, while the device is wanted for something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.base.torch_internals import point
from shardwise.core.memory.host import HostArena, host_block
from shardwise.core.memory.tier import Tier
from shardwise.core.optim.nested_state import tensors_of
from shardwise.core.update.tiles import Tile

__all__ = ["Aside"]


class Aside:
    """Of one optimizer. Between steps alone, and on every rank alike.

    Args:
        optimizer: the user's.
        tiles: what it updates.
        changed: called when state has another home.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tiles: Sequence[Tile], changed: Callable[[], None]) -> None:
        self._optimizer, self._tiles, self._changed = optimizer, tiles, changed
        self._moved: list[Tile] = []
        """Noted before the first of them moves: an interrupt may leave some here and some there."""
        self._half = False
        """They are moving, or an interrupt has ended that."""
        self._arena: torch.Tensor | None = None
        self._left: list[torch.Tensor] = []
        """Inside nested state, and on the host before anything was moved there."""

    def check(self) -> None:
        """Training needs what waits.

        Raises:
            RuntimeError: something does.
        """
        if self._moved:
            raise RuntimeError(
                f"training with the masters and state of {len(self._moved)} tiles set aside in host memory: bring them "
                "back first (bring_back() of the session, or reload_states())"
            )

    def put(self, pin: bool) -> int:
        """Move what is at home on the device to host memory, which must have room for it.

        Args:
            pin: page-lock that, where the device is a GPU; it is kept for the next time then.

        Returns:
            Bytes moved.
        """
        if self._half:
            self.bring_back()
        mine = [tile for tile in self._tiles if tile.state.tier is Tier.DEVICE]
        if not mine:
            return 0
        if not self._moved:
            self._left = [inner for inner in self._inner(mine) if inner.device != mine[0].chunk.device]
        sizes = [HostArena.rounded(value.nbytes) for value in self._values(mine)]
        arena, start = self._arena, 0
        if arena is None or sum(sizes) > arena.numel():
            arena = host_block(sum(sizes), mine[0].chunk.device if pin else None)
        self._arena = arena if pin else None

        def copied(value: torch.Tensor) -> torch.Tensor:
            nonlocal start
            place = arena[start : start + value.nbytes].view(value.dtype)
            start += HostArena.rounded(value.nbytes)
            return place.copy_(value.reshape(-1)).view(value.shape)

        self._moved = mine
        self._replace(mine, copied, Tier.HOST)
        return sum(sizes)

    def bring_back(self) -> None:
        """Move it back to where it was; also what an interrupt has left half moved, either way."""
        if self._moved:
            device = self._moved[0].chunk.device
            self._replace(self._moved, lambda value: value.to(device, copy=True), Tier.DEVICE)
            self._moved, self._left = [], []

    def _values(self, tiles: Sequence[Tile]) -> Iterator[torch.Tensor]:
        for state in {id(tile.state): tile.state for tile in tiles}.values():
            if state.master is not None:
                yield state.master
        for own, key in self._elements(tiles):
            yield own[key]
        yield from self._inner(tiles)

    def _elements(self, tiles: Sequence[Tile]) -> Iterator[tuple[dict[str, Any], str]]:
        """State of the shape of its piece: what is there for each element."""
        for tile in tiles:
            for piece in tile.pieces:
                own = self._optimizer.state.get(piece.value, {})
                for key, value in own.items():
                    if isinstance(value, torch.Tensor) and value.shape == piece.value.shape:
                        yield own, key

    def _inner(self, tiles: Sequence[Tile]) -> list[torch.Tensor]:
        """Tensors in lists, tuples and dicts of state, each once; none that counts (of no dimension), and none that was
        on the host before."""
        left, found = {id(each) for each in self._left}, {}
        for tile in tiles:
            for piece in tile.pieces:
                own = self._optimizer.state.get(piece.value, {})
                for value in (value for value in own.values() if not isinstance(value, torch.Tensor)):
                    for each in tensors_of(value):
                        if each.dim() and id(each) not in left:
                            found[id(each)] = each
        return list(found.values())

    @torch.no_grad()
    def _replace(self, tiles: Sequence[Tile], copied: Callable[[torch.Tensor], torch.Tensor], tier: Tier) -> None:
        by_state: dict[int, list[Tile]] = {}
        for tile in tiles:
            by_state.setdefault(id(tile.state), []).append(tile)
        self._half = True
        try:
            for own in by_state.values():
                if own[0].state.master is not None:
                    own[0].state.master = copied(own[0].state.master)
                    _point(own)
            for entry, key in list(self._elements(tiles)):
                entry[key] = copied(entry[key])
            for inner in self._inner(tiles):
                point(inner, copied(inner))  # where it stands in its list or tuple
            for own in by_state.values():
                own[0].state.home = replace(own[0].state.home, state=tier)
        except BaseException:
            _point(tiles)  # loads write masters, and saves read pieces: also before it is brought back
            raise
        finally:
            self._changed()
        self._half = False


def _point(tiles: Sequence[Tile]) -> None:
    """Pieces have the memory of their masters."""
    for tile in tiles:
        if tile.state.master is not None:
            for piece in tile.pieces:
                point(piece.value, tile.state.master[piece.start : piece.end].view(piece.value.shape))
