"""Moves masters and optimizer state from the device to host memory for a while, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.base.torch_internals import point
from shardwise.core.memory.host import HostArena, host_block
from shardwise.core.memory.tier import Tier
from shardwise.core.optim.nested_state import tensors_of
from shardwise.core.update.tiles import UpdateTile

__all__ = ["StateOffload"]


class StateOffload:
    """Masters and state of one optimizer. Used between steps, on every rank, with Ctrl-C deferred.

    Args:
        optimizer: the user's.
        tiles: what it updates.
        changed: called when state has another home.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, tiles: Sequence[UpdateTile], changed: Callable[[], None]
    ) -> None:
        self._optimizer, self._tiles, self._changed = optimizer, tiles, changed
        self._moved: list[UpdateTile] = []
        self._arena: torch.Tensor | None = None
        self._host_before: list[torch.Tensor] = []
        """Tensors of nested state that were on the host before anything was moved there."""

    def check(self) -> None:
        """Raise if state is offloaded, since training needs it.

        Raises:
            RuntimeError: it is.
        """
        if self._moved:
            raise RuntimeError(
                f"the masters and state of {len(self._moved)} tiles are offloaded to host memory: call "
                "reload_states() before training goes on"
            )

    def offload(self, pin: bool) -> int:
        """Move what is at home on the device to host memory, which must have room for it.

        Args:
            pin: page-lock that memory if the device is a GPU, and keep it for the next time.

        Returns:
            Bytes moved.
        """
        tiles = [tile for tile in self._tiles if tile.state.tier is Tier.DEVICE]
        if not tiles:
            return 0
        self._host_before = [inner for inner in self._inner(tiles) if inner.device != tiles[0].chunk.device]
        sizes = [HostArena.rounded(value.nbytes) for value in self._values(tiles)]
        arena, start = self._arena, 0
        if arena is None or sum(sizes) > arena.numel():
            arena = host_block(sum(sizes), tiles[0].chunk.device if pin else None)
        self._arena = arena if pin else None

        def copied(value: torch.Tensor) -> torch.Tensor:
            nonlocal start
            place = arena[start : start + value.nbytes].view(value.dtype)
            start += HostArena.rounded(value.nbytes)
            return place.copy_(value.reshape(-1)).view(value.shape)

        self._moved = tiles
        self._replace(tiles, copied, Tier.HOST)
        return sum(sizes)

    def reload(self) -> None:
        """Move it back to the device."""
        if self._moved:
            device = self._moved[0].chunk.device
            self._replace(self._moved, lambda value: value.to(device, copy=True), Tier.DEVICE)
            self._moved, self._host_before = [], []

    def _values(self, tiles: Sequence[UpdateTile]) -> Iterator[torch.Tensor]:
        for state in {id(tile.state): tile.state for tile in tiles}.values():
            if state.master is not None:
                yield state.master
        for own, key in self._elements(tiles):
            yield own[key]
        yield from self._inner(tiles)

    def _elements(self, tiles: Sequence[UpdateTile]) -> Iterator[tuple[dict[str, Any], str]]:
        """Element-wise state: of the shape of its piece."""
        for tile in tiles:
            for piece in tile.pieces:
                own = self._optimizer.state.get(piece.value, {})
                for key, value in own.items():
                    if isinstance(value, torch.Tensor) and value.shape == piece.value.shape:
                        yield own, key

    def _inner(self, tiles: Sequence[UpdateTile]) -> list[torch.Tensor]:
        """Tensors in lists, tuples and dicts of state, each once, without counts (of no dimension) and without those
        that were on the host before."""
        skipped, found = {id(each) for each in self._host_before}, {}
        for tile in tiles:
            for piece in tile.pieces:
                own = self._optimizer.state.get(piece.value, {})
                for value in (value for value in own.values() if not isinstance(value, torch.Tensor)):
                    for each in tensors_of(value):
                        if each.dim() and id(each) not in skipped:
                            found[id(each)] = each
        return list(found.values())

    @torch.no_grad()
    def _replace(self, tiles: Sequence[UpdateTile], copied: Callable[[torch.Tensor], torch.Tensor], tier: Tier) -> None:
        by_state: dict[int, list[UpdateTile]] = {}
        for tile in tiles:
            by_state.setdefault(id(tile.state), []).append(tile)
        for own in by_state.values():
            state = own[0].state
            if state.master is not None:
                state.master = copied(state.master)
                for piece in (piece for tile in own for piece in tile.pieces):
                    point(piece.value, state.master[piece.start : piece.end].view(piece.value.shape))
        for entry, key in list(self._elements(tiles)):
            entry[key] = copied(entry[key])
        for inner in self._inner(tiles):
            point(inner, copied(inner))  # in place, since it stands in a list or tuple
        for own in by_state.values():
            own[0].state.home = replace(own[0].state.home, state=tier)
        self._changed()
