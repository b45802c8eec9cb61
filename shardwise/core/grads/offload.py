"""Copies of reduced gradients from a GPU to the host, which neither block the host nor allocate.

A copy has landed when the gradient shard is first read (:attr:`ChunkGrads.reduced`).
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from shardwise.core.base.device import copy_ahead, is_page_locked, record_event, runs_ahead
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
    """

    def __init__(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        copy_ahead(memory, out)
        self._event = record_event(out.device) if out.is_cuda else None

    def land(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class GradOffload:
    """Copies to the host, of one reducer.

    The first result of a step goes to the memory where it stays; a later one into one of two blocks, and the host adds
    it when the gradient shard is read, or when the block is needed again. Blocks are page-locked where gradients are.
    """

    def __init__(self) -> None:
        self._blocks = GradRing(torch.device("cpu"), None)
        self._largest = 0
        self._adding: deque[ChunkGrads] = deque()

    def bytes(self) -> int:
        """Return the bytes of host memory of the blocks."""
        return self._largest * (len(self._blocks.idle()) + len(self._adding))

    def takes(self, state: ChunkGrads, out: torch.Tensor) -> bool:
        """Whether the result ``out`` leaves a device on which work is queued."""
        return runs_ahead(out.device) and state.home is not Tier.DEVICE

    def begin(self, state: ChunkGrads, out: torch.Tensor) -> None:
        """Begin to copy ``out`` to the gradient shard of ``state``, or to add it."""
        if state.memory is None:
            memory = state.own_memory()
            state.lands(memory, _Copy(memory, out).land)
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
        state.lands(total, partial(self._add, _Copy(part, out), state, part, ring, block))
        self._adding.append(state)

    def _add(self, copy: _Copy, state: ChunkGrads, part: torch.Tensor, ring: GradRing, block: torch.Tensor) -> None:
        copy.land()
        self._adding.remove(state)
        if state.memory is not None:
            state.memory.add_(part)
        ring.give(block)
