"""Communication of activations between sequence-parallel ranks, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.core.comm import Group, P2PChannel
from shardwise.core.parallel.tensor.axis import Axis, Ranks

TAGS = 1 << 20


# [Note: Gradients across a sequence]
# For the engine, the ranks of this axis are data-parallel ranks: each has a loss, and gradients are averaged over all
# of them. The function that is differentiated is therefore the sum of the ranks' losses, and no assumption is made
# about what the ranks compute in common. An exchange is a permutation of the data of all ranks, whose derivative is the
# exchange in the other direction. Data that is sent to several ranks gets the sum of the gradients that they return:
# the gradient of a gather is reduce-scattered, and that of an all-reduced sum is all-reduced.
class SequenceAxis(Ranks):
    """The ranks that have parts of the same sequences. All of them run the same passes with the same shapes.

    Args:
        group: these ranks, for host-side agreement, gathers and sums.
        wire: the point-to-point channel between them, for heads, keys and values.
        compress: send heads and their gradients in 8 bits; other data is not compressed.
    """

    def __init__(self, group: Group, wire: P2PChannel, compress: bool = False) -> None:
        super().__init__(group)
        self.wire = wire
        self.narrow = wire.compressed() if compress else wire
        self._count, self._over = 0, Axis(group)

    def tags(self, count: int) -> range:
        """Return tags for ``count`` messages to a peer. They are equal on every rank."""
        self._count = self._count % TAGS + count
        return range(self._count - count, self._count)

    # ---- differentiable

    def exchanged(
        self, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int], what: str, narrow: bool = False
    ) -> list[Tensor]:
        """Exchange tensors with all ranks (all-to-all), and return the received tensors by rank.

        Args:
            parts: a 1-D tensor to send to each rank, all of one dtype.
            sizes: the number of elements to receive from each rank.
            what: description for error messages.
            narrow: use 8 bits, if compression is enabled.
        """
        way = self.narrow if narrow else self.wire
        sent = tuple(sum(part.numel() for part in each) for each in parts)
        x = torch.cat([part.reshape(-1) for each in parts for part in each])
        flat: Tensor = _Exchange.apply(x, self, sent, tuple(sizes), (way, 0, what))  # type: ignore[no-untyped-call]
        return list(torch.split(flat, list(sizes)))

    def gathered(self, x: Tensor) -> list[Tensor]:
        """Return ``x`` of every rank, by rank; all have the same shape."""
        return list(self._over.gathered_for_parts(x.unsqueeze(0), 0, [1] * self.size))

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks, bitwise equal on all of them."""
        return self._over.copied(self._over.summed(x))


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
        wire, lane, what = way
        wire.exchange(x, out, sent, came, lane, what)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wire, lane, what = ctx.way
        way = (wire, 1 - lane, f"the gradient of {what}")
        back = _Exchange.apply(grad, ctx.axis, ctx.came, ctx.sent, way)  # type: ignore[no-untyped-call]
        return back, None, None, None, None
