"""What the ranks that share sequences send each other, with the gradients that belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise.core.comm import Group, P2PChannel
from shardwise.core.parallel.tensor.axis import Ranks

__all__ = ["SequenceAxis"]

TAGS = 1 << 20


# [Note: Gradients across a sequence]
# The ranks of this axis are data-parallel ranks to the engine: each has a loss, and gradients are averaged over all of
# them. So what is differentiated is the sum of the ranks' losses, whatever each of them computes, and nothing is
# assumed of what they compute alike. An exchange is then a permutation of what all ranks hold together, with the
# exchange in the other direction as its derivative; what is sent to several ranks gets the sum of what comes back from
# each, since it was copied for each before. A gather is that, and so is a sum over the ranks: both are made of this one
# exchange.
class SequenceAxis(Ranks):
    """The ranks that hold parts of the same sequences. All of them make the same passes with the same shapes.

    Args:
        group: these ranks, for what they agree on.
        wire: between them, for activations.
        compress: heads travel in 8 bits, and their gradients; nothing else does.
    """

    def __init__(self, group: Group, wire: P2PChannel, compress: bool = False) -> None:
        super().__init__(group)
        self.wire = wire
        self.narrow = wire.compressed() if compress else wire
        self._count = 0

    def tags(self, count: int) -> range:
        """Numbers for ``count`` messages to a peer; the same on every rank."""
        self._count = self._count % TAGS + count
        return range(self._count - count, self._count)

    # ---- with gradients

    def exchanged(self, parts: Sequence[Tensor], sizes: Sequence[int], what: str, narrow: bool = False) -> list[Tensor]:
        """By rank, what it has for this one.

        Args:
            parts: by rank, 1-D, what this one has for it; all of one dtype.
            sizes: by rank, elements that come from it.
            what: for errors.
            narrow: in 8 bits, if anything is.
        """
        way = self.narrow if narrow else self.wire
        sent = tuple(part.numel() for part in parts)
        flat: Tensor = _Exchange.apply(torch.cat(list(parts)), self, sent, tuple(sizes), (way, 0, what))  # type: ignore[no-untyped-call]
        return list(torch.split(flat, list(sizes)))

    def gathered(self, x: Tensor, what: str) -> list[Tensor]:
        """By rank, its ``x`` (alike in shape)."""
        flat = x.reshape(-1)
        parts = self.exchanged([flat] * self.size, [flat.numel()] * self.size, what)
        return [part.view(x.shape) for part in parts]

    def total(self, x: Tensor, what: str) -> Tensor:
        """The sum of ``x`` over the ranks, the same bits on all of them."""
        return torch.stack(self.gathered(x, what)).sum(0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: SequenceAxis,
        sent: tuple[int, ...],
        came: tuple[int, ...],
        way: tuple[P2PChannel, int, str],
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.came, ctx.way = axis, sent, came, way
        x = x.contiguous()
        out = x.new_empty(sum(came))
        froms = [0, *accumulate(sent)]
        tos = [0, *accumulate(came)]
        rank, (tag,), (wire, lane, what) = axis.rank, axis.tags(1), way
        out[tos[rank] : tos[rank + 1]] = x[froms[rank] : froms[rank + 1]]
        arriving = []
        # In each round the ranks meet in pairs. The lower one begins to send, the other to receive: a device that
        # carries out the messages of a pair one after the other goes on, too.
        for round_ in range(axis.size):
            peer = (round_ - rank) % axis.size
            if peer == rank:
                continue
            for sends in (True, False) if rank < peer else (False, True):
                if sends and sent[peer]:
                    wire.send(x[froms[peer] : froms[peer + 1]], peer, lane, tag, what)
                elif not sends and came[peer]:
                    arriving.append(wire.begin_receive(out[tos[peer] : tos[peer + 1]], peer, lane, tag, what))
        for message in arriving:
            message.wait()
        wire.settle()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wire, lane, what = ctx.way
        way = (wire, 1 - lane, f"the gradient of {what}")
        back = _Exchange.apply(grad, ctx.axis, ctx.came, ctx.sent, way)  # type: ignore[no-untyped-call]
        return back, None, None, None, None
