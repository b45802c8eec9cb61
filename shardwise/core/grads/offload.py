"""Copies of reduced gradients from a GPU to the host, on their own stream. They neither block the host nor allocate.

A copy has landed when the gradient shard is first read (:attr:`ChunkGrads.reduced`).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch

from shardwise.core.base.device import behind_current, copy_ahead, is_page_locked, record_event, recorded, side_stream
from shardwise.core.base.torch_internals import labelled
from shardwise.core.comm import Buffer
from shardwise.core.grads.grads import ChunkGrads, GradRing
from shardwise.core.memory.tier import Tier

__all__ = ["GradOffload"]

# One may be copied while the host adds the other.
MAX_IN_FLIGHT = 2
"""Results that may wait at a time to be added to the gradient shard."""


class _Copy:
    """A copy to the host, queued behind the operation that makes the result.

    Args:
        memory: host memory.
        out: the result.
        stream: a GPU's stream for the copy, so that compute does not wait for it.
        exchanged: what ``out`` lies in, if that is exchange memory.
    """

    def __init__(self, memory: torch.Tensor, out: torch.Tensor, stream: Any, exchanged: Buffer | None) -> None:
        with behind_current(out.device, stream):
            copy_ahead(memory, out)
            self._event = record_event(out.device)
        recorded(out, stream)
        if exchanged is not None:
            exchanged.reader = self._event

    def land(self) -> None:
        self._event.synchronize()


class GradOffload:
    """Copies to the host, of one reducer.

    The first result of a step goes to the memory where it stays; a later one into one of two blocks, and the host adds
    it when the gradient shard is read, or when the block is needed again. Blocks are page-locked where gradients are.

    Args:
        device: of the results.
    """

    def __init__(self, device: torch.device) -> None:
        self._downloads: Any = side_stream(device)
        """``None`` where nothing is copied."""
        self._blocks = GradRing(torch.device("cpu"), None)
        self._largest = 0
        self._adding: deque[ChunkGrads] = deque()

    def bytes(self) -> int:
        """Return the bytes of host memory of the blocks."""
        return self._largest * (len(self._blocks.idle()) + len(self._adding))

    def takes(self, state: ChunkGrads) -> bool:
        """Whether the result leaves a GPU."""
        return self._downloads is not None and state.home is not Tier.DEVICE

    @labelled("offload", lambda _, state, *__: state.spec.title)
    def begin(self, state: ChunkGrads, out: torch.Tensor, exchanged: Buffer | None) -> None:
        """Begin to copy ``out`` to the gradient shard of ``state``, or to add it. It may lie in ``exchanged``."""
        if state.memory is None:
            memory = state.own_memory()
            state.lands(memory, _Copy(memory, out, self._downloads, exchanged).land)
            return
        # Also an earlier result of this chunk, whose sum is read below; it gives a block back.
        while len(self._adding) >= MAX_IN_FLIGHT or state in self._adding:
            self._adding[0].land()  # removes it
        if out.nbytes > self._largest:
            self._blocks = GradRing(torch.device("cpu"), out.device if is_page_locked(state.memory) else None)
            self._largest = out.nbytes
        ring, total = self._blocks, state.reduced
        block = ring.take(self._largest, torch.uint8)
        part = block[: out.nbytes].view(out.dtype)
        copy = _Copy(part, out, self._downloads, exchanged)
        state.lands(total, partial(self._add, copy, state, part, ring, block))
        self._adding.append(state)

    def _add(self, copy: _Copy, state: ChunkGrads, part: torch.Tensor, ring: GradRing, block: torch.Tensor) -> None:
        copy.land()
        self._adding.remove(state)
        if state.memory is not None:
            state.memory.add_(part)
        ring.give(block)
