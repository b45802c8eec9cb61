"""Products with what the ranks of an axis pass on from neighbour to neighbour: each piece is multiplied while the next
travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.core.comm import Wire

__all__ = ["Ring", "columns_of_pieces", "pieces_of_rows"]

TAGS = 1 << 20
VALUES, GRADIENTS = 0, 1
"""Lanes of a wire."""


# [Note: Products of pieces]
# Source: Wang et al., "Overlap communication with dependent computation via decomposition" (ASPLOS 2023). A gather of
# tokens before a product goes round in steps: a rank multiplies the piece that it has while it sends it on and the next
# one comes. A product whose sum over the ranks is divided by tokens goes round the other way: a rank makes its part of
# the piece that it will add to what is coming, and sends the sum on. Each is the other's backward. The bytes are those
# of a gather and of a divided sum; sums are made in the travelling dtype, in the order of the ring.
class Ring:
    """The ranks of an axis, one behind the other.

    Args:
        wire: between them.
        rank, size: of this one, and how many.
    """

    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        self.wire, self.rank, self.size = wire, rank, size
        self._count = 0

    def __deepcopy__(self, _memo: object) -> Ring:
        return self

    def arriving(self, own: Tensor, shapes: Sequence[torch.Size], lane: int) -> Iterator[tuple[int, Tensor]]:
        """Every rank's piece with that rank, the own one first; the next one travels until it is asked for.

        Args:
            own: this rank's.
            shapes: of the pieces, by rank.
            lane: of the wire: ``VALUES`` or ``GRADIENTS``.
        """
        self._connect(lane)
        piece, whose = own, self.rank
        for step in range(self.size):
            last = step + 1 == self.size
            if not last:
                self._send(piece, lane)
                coming, wait = self._receive(shapes[(whose - 1) % self.size], own, lane)
            yield whose, piece
            if not last:
                wait()
                piece, whose = coming, (whose - 1) % self.size
        self.wire.settle()

    def summed(self, part_of: Callable[[int], Tensor], shapes: Sequence[torch.Size], like: Tensor, lane: int) -> Tensor:
        """This rank's piece of the sum over the ranks.

        Args:
            part_of: what this rank adds to the piece of a rank.
            shapes: of the pieces, by rank.
            like: a tensor of their dtype and device.
            lane: as for :meth:`arriving`.
        """
        self._connect(lane)
        for step in range(self.size):
            whose = (self.rank - 1 - step) % self.size
            if step:
                coming, wait = self._receive(shapes[whose], like, lane)
            part = part_of(whose)
            if step:
                wait()
                part = coming.add_(part)
            if step + 1 < self.size:
                self._send(part, lane)
        self.wire.settle()
        return part

    def _connect(self, lane: int) -> None:
        self.wire.connect((rank, (rank + 1) % self.size, lane) for rank in range(self.size))  # each sends first

    def _send(self, piece: Tensor, lane: int) -> None:
        self._count = (self._count + 1) % TAGS
        if piece.numel():
            self.wire.send(piece, (self.rank + 1) % self.size, lane, self._count, "tokens on their way round")

    def _receive(self, shape: torch.Size, like: Tensor, lane: int) -> tuple[Tensor, Callable[[], None]]:
        """What the rank before sends with its latest tag, which is this one's latest or next."""
        x = like.new_empty(shape)
        if not x.numel():
            return x, lambda: None
        before = (self.rank - 1) % self.size
        message = self.wire.begin_receive(x, before, lane, self._count, "tokens on their way round")
        return x, message.wait


def columns_of_pieces(
    ring: Ring, x: Tensor, dim: int, sizes: Sequence[int], layers: Sequence[tuple[Tensor, Tensor | None, bool]]
) -> tuple[Tensor, ...]:
    """All ranks' ``x`` one behind the other in ``dim``, and its products with several layers of which each rank has a
    part.

    Args:
        ring: the ranks.
        x: ``[..., inputs]``, of this rank.
        dim: of tokens.
        sizes: by rank, of that dimension.
        layers: weight, bias, and whether the weight is ``[inputs, outputs]``.
    """
    flat = [each for weight, bias, _ in layers for each in (weight, bias)]
    turned = [each for _, _, each in layers]
    x, *flat = _as_products_are(x, *flat)
    found: tuple[Tensor, ...] = _Columns.apply(x, ring, dim, tuple(sizes), turned, *flat)  # type: ignore[no-untyped-call]
    return found


def pieces_of_rows(ring: Ring, x: Tensor, dim: int, sizes: Sequence[int], weight: Tensor, turned: bool) -> Tensor:
    """This rank's piece of the sum over the ranks of the product of ``x``.

    Args:
        ring: the ranks.
        x: ``[..., part of the inputs]``, of all tokens.
        dim: of tokens.
        sizes: by rank, of that dimension.
        weight: of this rank's part of the layer, ``[outputs, inputs]`` unless it is ``turned``.
        turned: it is the other way round.
    """
    x, weight = _as_products_are(x, weight)
    y: Tensor = _Rows.apply(x, ring, dim, tuple(sizes), turned, weight)  # type: ignore[no-untyped-call]
    return y


def _as_products_are(x: Tensor, *others: Any) -> list[Any]:
    """In the dtype that autocast gives to products."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return [x, *others]
    dtype = torch.get_autocast_dtype(kind)
    return [None if each is None else each.to(dtype) for each in (x, *others)]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ring: Ring, dim: int, sizes: tuple[int, ...], turned: list[bool], *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = flat[::2], flat[1::2]
        tokens = list(x.shape)
        tokens[dim] = sum(sizes)
        wide = x.new_empty(tokens)
        products = [x.new_empty([*tokens[:-1], _outputs(w, t)]) for w, t in zip(weights, turned, strict=True)]
        for rank, piece in ring.arriving(x, _shapes(x, dim, sizes), VALUES):
            _piece(wide, dim, sizes, rank).copy_(piece)
            for y, weight, bias, t in zip(products, weights, biases, turned, strict=True):
                own = piece @ _turned(weight, t)
                _piece(y, dim, sizes, rank).copy_(own if bias is None else own.add_(bias))
        ctx.ring, ctx.dim, ctx.sizes, ctx.turned = ring, dim, sizes, turned
        ctx.biased = [bias is not None for bias in biases]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(wide, *weights)
        return wide, *products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_wide: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        wide, *weights = ctx.saved_tensors
        dim, sizes, turned = ctx.dim, ctx.sizes, ctx.turned
        used = [(g, w, t) for g, w, t in zip(grads, weights, turned, strict=True) if g is not None]

        def part_of(rank: int) -> Tensor:
            parts = [_piece(grad, dim, sizes, rank) @ _turned(weight, not t) for grad, weight, t in used]
            if of_wide is not None:
                parts.append(_piece(of_wide, dim, sizes, rank))
            return sum(parts[1:], parts[0]).contiguous()

        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = ctx.ring.summed(part_of, _shapes(wide, dim, sizes), wide, GRADIENTS)
        flat: list[Tensor | None] = []
        for index, (grad, t) in enumerate(zip(grads, turned, strict=True)):
            wanted, biased = ctx.needs_input_grad[5 + 2 * index : 7 + 2 * index]
            flat.append(_of_weight(grad, wide, t) if wanted and grad is not None else None)
            flat.append(grad.flatten(0, -2).sum(0) if biased and grad is not None else None)
        return of_x, None, None, None, None, *flat


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ring: Ring, dim: int, sizes: tuple[int, ...], turned: bool, weight: Tensor
    ) -> Tensor:
        ctx.ring, ctx.dim, ctx.sizes, ctx.turned = ring, dim, sizes, turned
        ctx.save_for_backward(x, weight)
        shapes = _shapes(x, dim, sizes, _outputs(weight, turned))
        return ring.summed(lambda rank: _piece(x, dim, sizes, rank) @ _turned(weight, turned), shapes, x, VALUES)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dim, sizes = ctx.dim, ctx.sizes
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight) if ctx.needs_input_grad[5] else None
        for rank, piece in ctx.ring.arriving(grad.contiguous(), _shapes(grad, dim, sizes), GRADIENTS):
            _piece(of_x, dim, sizes, rank).copy_(piece @ _turned(weight, not ctx.turned))
            if of_weight is not None:
                of_weight += _of_weight(piece, _piece(x, dim, sizes, rank), ctx.turned)
        return of_x, None, None, None, None, of_weight


def _shapes(x: Tensor, dim: int, sizes: Sequence[int], width: int | None = None) -> list[torch.Size]:
    """Of the ranks' pieces."""
    shape = [*x.shape[:-1], x.shape[-1] if width is None else width]
    return [torch.Size(size if at == dim else n for at, n in enumerate(shape)) for size in sizes]


def _piece(x: Tensor, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def _outputs(weight: Tensor | None, turned: bool) -> int:
    assert weight is not None
    return weight.shape[1] if turned else weight.shape[0]


def _turned(weight: Tensor | None, turned: bool) -> Tensor:
    """``[inputs, outputs]``."""
    assert weight is not None
    return weight if turned else weight.T


def _of_weight(grad: Tensor, x: Tensor, turned: bool) -> Tensor:
    left, right = (x, grad) if turned else (grad, x)
    return left.flatten(0, -2).T @ right.flatten(0, -2)
