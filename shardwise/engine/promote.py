"""Moves optimizer state from the host to what the device has left after the first step.

Source: Gemini's ``gpu_margin_mem_ratio`` and ZeRO-Offload++'s twin flow: updates of that state then run on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise.engine.engine import Engine
from shardwise.memory.tier import Tier
from shardwise.reduce.grads import ChunkGrads
from shardwise.torch_internals import point
from shardwise.update.states import ChunkState
from shardwise.update.tiles import Tile

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
            grads.move_to_device(engine.storage.ring(Tier.DEVICE) if engine.plan.streams_gradients else None)
            moved += size
    if moved and engine.plan.streams_gradients:
        engine.storage.ring(Tier.HOST).drop()  # what is still needed of it is taken anew
    return moved


def _size(state: ChunkState, grads: ChunkGrads, optimizer: torch.optim.Optimizer, tiles: Sequence[Tile]) -> int:
    spec = state.chunk.spec
    entries = [v for t in tiles for p in t.pieces for v in optimizer.state.get(p.value, {}).values()]
    held = sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))
    gradient = spec.shard_numel * grads.accumulate_dtype.itemsize
    return held + spec.shard_numel * (state.dtype or spec.dtype).itemsize + gradient


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
            elements = piece.value.shape
            point(piece.value, state.master[piece.start : piece.end])
            for key, value in old.items():
                if isinstance(value, torch.Tensor) and value.shape == elements:
                    old[key] = value.to(chunk.device, copy=True)
