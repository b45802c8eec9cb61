"""Copies of a tile's values and state, for an update that may yet be undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shardwise.torch_internals import point
from shardwise.update.tiles import Tile

__all__ = ["copied"]

State = MutableMapping[torch.Tensor, Any]


@contextmanager
def copied(tile: Tile, state: State, undo: list[Callable[[], None]]) -> Iterator[None]:
    """Inside the block the tile's values, and their entries of ``state``, are copies.

    Args:
        tile: whose.
        state: of its optimizer.
        undo: what puts the originals back is added: an interrupt may come while the block's end does.
    """
    kept = [(piece.value, piece.value.data, state.get(piece.value)) for piece in tile.pieces]
    put_back = partial(_put_back, state, kept)
    undo.append(put_back)
    try:
        for value, values, entry in kept:
            point(value, values.clone())
            if entry is not None:
                state[value] = {key: _copy(each) for key, each in entry.items()}
        yield
    finally:
        put_back()


def _put_back(state: State, kept: Sequence[tuple[torch.Tensor, torch.Tensor, dict[str, Any] | None]]) -> None:
    for value, values, entry in kept:
        point(value, values)
        if entry is not None:
            state[value] = entry
        else:
            state.pop(value, None)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
