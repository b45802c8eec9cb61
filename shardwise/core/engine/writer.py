"""Writes whole parameters into this rank's part of shards and masters, wherever they are at home."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import TracebackType

import torch

from shardwise.core.comm import collectively
from shardwise.core.engine.storage import Storage
from shardwise.core.memory.disk.store import DiskError

__all__ = ["ValueWriter"]

DOING = "writing parameters to disk"
OUTCOME = "Some parameters have their new values and others have not: load them again once that is put right."


class ValueWriter:
    """Takes parameters one at a time; a context, inside which the last chunk written stays in memory.

    Leaving the context is collective where a disk is in use. A disk that fails on one rank does not interrupt the
    block, in which ranks may need each other, but makes all of them raise at its end.

    Args:
        storage: the chunks and masters to write. Call ``Values.publish`` on every rank afterwards.

    Raises:
        DiskError: at the end of the block, on every rank.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._stack = ExitStack()
        self._chunk: int | None = None
        self._shard: torch.Tensor | None = None
        self._master: torch.Tensor | None = None
        self._failure: DiskError | None = None

    def __enter__(self) -> ValueWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with collectively(self._storage.mesh.everyone, DOING, OUTCOME, DiskError, self._storage.uses_disk):
            self._open(None)
            if self._failure is not None:
                raise self._failure

    def _open(self, index: int | None) -> None:
        """Keep what was written to the chunk before, and open another."""
        if index == self._chunk or self._failure is not None:
            return
        self._chunk, self._shard, self._master = index, None, None
        try:
            self._stack.close()
            if index is not None:
                chunk, state = self._storage.chunks[index], self._storage.states.get(index)
                self._shard = self._stack.enter_context(chunk.opened(write=True))
                self._master = self._stack.enter_context(state.opened(write=True)) if state is not None else None
        except DiskError as error:
            # The block goes on without writing: the peers need this rank's part in it, and learn of the failure at its
            # end.
            failed, self._stack, self._failure = self._stack, ExitStack(), error
            with suppress(DiskError):
                failed.__exit__(type(error), error, error.__traceback__)  # buffers go back, nothing is written

    @torch.no_grad()
    def store(self, param: int, value: torch.Tensor, local: bool = False) -> None:
        """Store parameter ``param`` (index into the layout's facts): its whole ``value``, any float dtype. Where ranks
        hold parts of it this one keeps its own, unless that is what is given (``local``)."""
        index, slot = self._storage.layout.where[param]
        self._open(index)
        if self._failure is not None:
            return
        chunk = self._storage.chunks[index]
        fact = self._storage.layout.facts[param]
        flat = (value.detach() if fact.part is None or local else fact.part.of(value.detach())).reshape(-1)
        state = self._storage.states.get(index)
        if state is not None and state.dtype is not None:
            flat = flat.to(state.dtype)  # the parameter is what the master rounds to
        start, end = chunk.overlap(slot)
        part = flat[start - slot.start : end - slot.start] if start < end else flat[:0]
        if chunk.resident:
            chunk.exchange.local[slot.start : slot.end].copy_(flat)
        elif self._shard is not None and start < end:
            self._shard[start - chunk.shard_start : end - chunk.shard_start].copy_(part)
        if self._master is not None and start < end:
            self._master[start - chunk.shard_start : end - chunk.shard_start].copy_(part)
