"""Writes whole parameters into this rank's part of shards and masters, wherever they are at home."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from shardwise.engine.storage import Storage

__all__ = ["ValueWriter"]


class ValueWriter:
    """Takes parameters one at a time; a context, inside which the last chunk written stays in memory.

    Args:
        storage: the chunks and masters to write. Call ``Engine.publish`` on every rank afterwards.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._stack = ExitStack()
        self._chunk: int | None = None
        self._shard: torch.Tensor | None = None
        self._master: torch.Tensor | None = None

    def __enter__(self) -> ValueWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._chunk = None

    def _open(self, index: int) -> None:
        if index != self._chunk:
            self._stack.close()
            chunk, state = self._storage.chunks[index], self._storage.states.get(index)
            self._shard = self._stack.enter_context(chunk.opened(write=True))
            self._master = self._stack.enter_context(state.opened(write=True)) if state is not None else None
            self._chunk = index

    @torch.no_grad()
    def store(self, param: int, value: torch.Tensor) -> None:
        """Store parameter ``param`` (index into the layout's facts): its whole ``value``, any float dtype."""
        index, slot = self._storage.layout.where[param]
        self._open(index)
        chunk = self._storage.chunks[index]
        flat = value.detach().reshape(-1)
        start, end = chunk.overlap(slot)
        part = flat[start - slot.start : end - slot.start] if start < end else flat[:0]
        if chunk.resident:
            chunk.exchange.local[slot.start : slot.end].copy_(flat)
        elif self._shard is not None and start < end:
            self._shard[start - chunk.shard_start : end - chunk.shard_start].copy_(part)
        if self._master is not None and start < end:
            self._master[start - chunk.shard_start : end - chunk.shard_start].copy_(part)
