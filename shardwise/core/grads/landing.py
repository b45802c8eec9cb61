"""Reduced gradients on their way from a GPU to the host, which neither waits for them nor allocates for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from shardwise.core.base.device import copy_ahead, is_page_locked, record_event, runs_ahead
from shardwise.core.base.torch_internals import version_of
from shardwise.core.grads.grads import ChunkGrads, GradRing
from shardwise.core.memory.tier import Tier

__all__ = ["Landings"]

# One may be copied while the host adds the other.
IN_FLIGHT = 2
"""Results that may wait at a time to be added to what there is."""


class _Landing:
    """A copy that was queued behind what makes it.

    Args:
        memory: the host's.
        out: what is copied.
    """

    def __init__(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        copy_ahead(memory, out)
        self._event = record_event(out.device) if out.is_cuda else None

    def land(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class _Adding:
    """A landing that is added to what there is: once, also where an interrupt comes and it is waited for again.

    Args:
        landing: of ``part``.
        total: what it is added to; nobody else changes it until then.
        part: the host's memory.
        free: called when ``part`` has been read.
    """

    def __init__(
        self, landing: _Landing, total: torch.Tensor | None, part: torch.Tensor, free: Callable[[], None]
    ) -> None:
        # Its own counter of changes: the sum and the note that it was made cannot come apart.
        self._landing, self._total, self._part = landing, None if total is None else total.data, part
        self._free = free
        self._before = 0 if self._total is None else version_of(self._total)

    def land(self) -> None:
        self._landing.land()
        if self._total is not None and version_of(self._total) == self._before:
            self._total.add_(self._part)
        self._free()


class Landings:
    """Of one reducer. A gradient has landed when it is read first (:attr:`ChunkGrads.reduced`).

    The first result of a step goes where it stays; a later one into one of two blocks, and is added to the first by the
    host when it is read, or when the block is needed again. Blocks are page-locked where gradients are.
    """

    def __init__(self) -> None:
        self._blocks = GradRing(torch.device("cpu"), None)
        self._largest = 0
        self._adding: deque[ChunkGrads] = deque()

    def bytes(self) -> int:
        """Host memory of the blocks."""
        return self._largest * (len(self._blocks.idle()) + len(self._adding))

    def takes(self, state: ChunkGrads, out: torch.Tensor) -> bool:
        """Whether a result for ``state`` leaves a device that the host is ahead of."""
        return runs_ahead(out.device) and state.home is not Tier.DEVICE

    def begin(self, state: ChunkGrads, out: torch.Tensor) -> None:
        """``state.reduced`` becomes ``out``, or that is added to it."""
        if state.held is None:
            memory = state.own_memory()
            state.lands(memory, _Landing(memory, out).land)
            return
        # Also its own, whose sum is read below: landed before a block is taken, it gives one back.
        while len(self._adding) >= IN_FLIGHT or state in self._adding:
            self._adding.popleft().land()
        if out.nbytes > self._largest:
            self._blocks = GradRing(torch.device("cpu"), out.device if is_page_locked(state.held) else None)
            self._largest = out.nbytes
        ring, total = self._blocks, state.reduced
        block = ring.take(self._largest, torch.uint8)
        part = block[: out.nbytes].view(out.dtype)
        state.lands(total, _Adding(_Landing(part, out), total, part, partial(self._free, state, ring, block)).land)
        self._adding.append(state)

    def _free(self, state: ChunkGrads, ring: GradRing, block: torch.Tensor) -> None:
        if state in self._adding:
            self._adding.remove(state)
        ring.give(block)
