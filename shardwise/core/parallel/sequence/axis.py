"""Communication of activations between sequence-parallel ranks, with its gradients."""

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
# For the engine, the ranks of this axis are data-parallel ranks: each has a loss, and gradients are averaged over all
# of them. The function that is differentiated is therefore the sum of the ranks' losses, and no assumption is made
# about what the ranks compute in common. An exchange is a permutation of the data of all ranks, whose derivative is the
# exchange in the other direction. Data that is sent to several ranks gets the sum of the gradients that they return,
# since it is copied for each of them first. A gather is such an exchange, and a sum over the ranks is based on a
# gather.
class SequenceAxis(Ranks):
    """The ranks that have parts of the same sequences. All of them run the same passes with the same shapes.

    Args:
        group: these ranks, for host-side agreement.
        wire: the point-to-point channel between them, for activations.
        compress: send heads and their gradients in 8 bits; other data is not compressed.
    """

    def __init__(self, group: Group, wire: P2PChannel, compress: bool = False) -> None:
        super().__init__(group)
        self.wire = wire
        self.narrow = wire.compressed() if compress else wire
        self._count = 0

    def tags(self, count: int) -> range:
        """Return tags for ``count`` messages to a peer; the same on every rank."""
        self._count = self._count % TAGS + count
        return range(self._count - count, self._count)

    # ---- differentiable

    def exchanged(self, parts: Sequence[Tensor], sizes: Sequence[int], what: str, narrow: bool = False) -> list[Tensor]:
        """Exchange tensors with all ranks (all-to-all), and return the received ones by rank.

        Args:
            parts: by rank, the 1-D tensor to send to it; all of one dtype.
            sizes: by rank, the number of elements to receive from it.
            what: description for error messages.
            narrow: use 8 bits, if compression is enabled.
        """
        way = self.narrow if narrow else self.wire
        sent = tuple(part.numel() for part in parts)
        flat: Tensor = _Exchange.apply(torch.cat(list(parts)), self, sent, tuple(sizes), (way, 0, what))  # type: ignore[no-untyped-call]
        return list(torch.split(flat, list(sizes)))

    def gathered(self, x: Tensor, what: str) -> list[Tensor]:
        """Return ``x`` of every rank, by rank; all have the same shape."""
        flat = x.reshape(-1)
        parts = self.exchanged([flat] * self.size, [flat.numel()] * self.size, what)
        return [part.view(x.shape) for part in parts]

    def total(self, x: Tensor, what: str) -> Tensor:
        """Return the sum of ``x`` over the ranks, bitwise equal on all of them."""
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
        # In each round the ranks form pairs. The lower one starts its send first, the other its receive, so that a
        # device that executes the messages of a pair sequentially does not deadlock.
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
