"""Copies of reduced gradients from a GPU to the host, on their own stream. The host does not wait for them.

The first read of the gradient shard (:attr:`ChunkGrads.reduced`) waits for its copy.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.base.device import behind_current, copy_ahead, record_event, recorded, sent_ahead, side_stream
from shardwise.core.base.torch_internals import labelled
from shardwise.core.comm import Buffer
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.memory.tier import Tier


class GradOffload:
    """Copies to the host, of one reducer.

    A later result of a step is added on the GPU: the sum so far is copied there and back, after earlier copies. Adding
    on the host would have to wait for a copy first.

    Args:
        device: of the results.
    """

    def __init__(self, device: torch.device) -> None:
        self._downloads: Any = side_stream(device)
        """The stream of the copies; ``None`` if nothing is copied."""

    def takes(self, state: ChunkGrads) -> bool:
        """Return whether the result is copied from a GPU to the host."""
        return self._downloads is not None and state.home is not Tier.DEVICE

    @labelled("offload", lambda _, state, *__: state.spec.title)
    def begin(self, state: ChunkGrads, out: torch.Tensor, exchanged: Buffer | None) -> None:
        """Begin to copy ``out`` to the gradient shard of ``state``, or to add it. ``out`` may be in ``exchanged``."""
        total, memory = out, state.memory
        with behind_current(out.device, self._downloads):
            if memory is None:
                memory = state.own_memory()
            else:
                total = sent_ahead(memory, out.device).add_(out)
            copy_ahead(memory, total)
            event = record_event(out.device)
        recorded(out, self._downloads)
        if exchanged is not None:
            exchanged.reader = event
        state.lands(memory, event.synchronize)
