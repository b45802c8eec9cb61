"""Which positions of a sequence each rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.parallel.sequence.axis import SequenceAxis

__all__ = ["Parts"]

Range = tuple[int, int]


@dataclass(frozen=True)
class Parts:
    """Of sequences of one length.

    Attributes:
        length: in tokens.
        ranks: that share them.
        zigzag: rank ``r`` of ``n`` has pieces ``r`` and ``2n - 1 - r`` of ``2n``, so that under a causal mask all have
            as much to compute; otherwise piece ``r`` of ``n``.
    """

    length: int
    ranks: int
    zigzag: bool

    @property
    def piece(self) -> int:
        """Tokens of each piece, some of which may be padding."""
        pieces = self.ranks * (2 if self.zigzag else 1)
        return -(-self.length // pieces)

    @property
    def padded(self) -> int:
        """The length with what is missing to equal pieces."""
        return self.piece * self.ranks * (2 if self.zigzag else 1)

    @property
    def local(self) -> int:
        """Tokens of a rank, with padding."""
        return self.padded // self.ranks

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Where ``rank``'s pieces are in the whole sequence, in the order in which it holds them."""
        pieces = (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)
        return tuple((piece * self.piece, (piece + 1) * self.piece) for piece in pieces)

    def pad(self, x: Tensor, dim: int, value: float = 0) -> Tensor:
        """``x`` of the whole length, with padding behind it."""
        missing = self.padded - x.shape[dim]
        if not missing:
            return x
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([x, x.new_full(shape, value)], dim)

    def take(self, x: Tensor, dim: int, rank: int, value: float = 0) -> Tensor:
        """``rank``'s part of ``x``, which is of the whole length in ``dim``.

        Args:
            x: any shape.
            dim: of the sequence.
            rank: whose part.
            value: of padding.
        """
        x = self.pad(x, dim, value)
        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.ranges(rank)], dim)

    def together(self, by_rank: list[Tensor], dim: int) -> Tensor:
        """What has the ranks' parts, in the order of the sequence, without padding."""
        pieces: dict[int, Tensor] = {}
        for rank, part in enumerate(by_rank):
            ranges = self.ranges(rank)
            for (start, _), piece in zip(ranges, torch.split(part, self.piece, dim), strict=True):
                pieces[start] = piece
        return torch.cat([pieces[start] for start in sorted(pieces)], dim).narrow(dim, 0, self.length)

    def whole(self, x: Tensor, dim: int, axis: SequenceAxis, what: str) -> Tensor:
        """``x`` of all ranks, with its gradient."""
        return self.together(axis.gathered(x, what), dim)
