"""Moves optimizer state from the host to what the device has left after the first step.

Source: Gemini's ``gpu_margin_mem_ratio`` and ZeRO-Offload++'s twin flow: updates of that state then run on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardwise.core.base.torch_internals import point
from shardwise.core.engine.engine import Engine
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.memory.tier import Tier
from shardwise.core.optim.nested_state import mapped, tensors_of
from shardwise.core.update.masters import ChunkState
from shardwise.core.update.tiles import Tile

__all__ = ["promote"]


def promote(engine: Engine, optimizer: torch.optim.Optimizer, tiles: Sequence[Tile], room_bytes: int) -> int:
    """Move masters and state of whole chunks, in the order of the tiles, as long as they fit.

    Called between steps, when no gradient is held.

    Returns:
        Bytes moved.
    """
    by_chunk: dict[int, list[Tile]] = {}
    for tile in tiles:
        if tile.state.tier is Tier.HOST:
            by_chunk.setdefault(tile.chunk.spec.index, []).append(tile)
    moved = 0
    for index, own in by_chunk.items():
        state, grads = engine.states[index], engine.grads[index]
        size = _size(state, grads, optimizer, own)
        if moved + size <= room_bytes:
            _move(state, optimizer, own)
            grads.move_to_device(engine.storage.ring(Tier.DEVICE) if engine.plan.grad.update == "backward" else None)
            moved += size
    if moved and engine.plan.grad.update == "backward":
        engine.storage.ring(Tier.HOST).drop()  # what is still needed of it is taken anew
    return moved


def _size(state: ChunkState, grads: ChunkGrads, optimizer: torch.optim.Optimizer, tiles: Sequence[Tile]) -> int:
    chunk = state.chunk
    entries = [optimizer.state.get(piece.value, {}) for tile in tiles for piece in tile.pieces]
    held: int = sum(value.nbytes for value in tensors_of(entries))
    gradient = chunk.shard_numel * grads.accumulate_dtype.itemsize
    return held + chunk.shard_numel * (state.dtype or chunk.spec.dtype).itemsize + gradient


@torch.no_grad()
def _move(state: ChunkState, optimizer: torch.optim.Optimizer, tiles: Sequence[Tile]) -> None:
    chunk = state.chunk
    with chunk.opened() as shard:
        # A copy also where both are the same memory, as on a CPU: what is on the host stays there.
        values = state.master if state.master is not None else shard
        state.master = values.to(chunk.device, copy=True)
    # From here on these are masters of their own, also where the shard itself was updated before.
    state.dtype = state.master.dtype
    state.home = replace(state.home, state=Tier.DEVICE)
    for tile in tiles:
        for piece in tile.pieces:
            old = optimizer.state.get(piece.value, {})
            point(piece.value, state.master[piece.start : piece.end].view(piece.value.shape))
            move = partial(_moved, elements=piece.value.shape, device=chunk.device)
            old.update({key: mapped(value, move) for key, value in old.items()})


def _moved(value: Any, elements: torch.Size, device: torch.device) -> Any:
    """A tensor of more than a count, on ``device``."""
    if isinstance(value, torch.Tensor) and (value.shape == elements or value.numel() > 1):
        return value.to(device, copy=True)
    return value
