"""Partition of the positions of a sequence over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.parallel.sequence.axis import SequenceAxis

Range = tuple[int, int]


@dataclass(frozen=True)
class Parts:
    """The partition of sequences of one length.

    Attributes:
        length: number of tokens of a sequence.
        ranks: number of sequence-parallel ranks.
        zigzag: whether rank ``r`` of ``n`` has pieces ``r`` and ``2n - 1 - r`` of ``2n``, which balances the work
            under a causal mask; otherwise it has piece ``r`` of ``n``.
    """

    length: int
    ranks: int
    zigzag: bool

    @property
    def piece(self) -> int:
        """Number of tokens of each piece, which may include padding."""
        pieces = self.ranks * (2 if self.zigzag else 1)
        return -(-self.length // pieces)

    @property
    def padded(self) -> int:
        """Length including the padding to equal pieces."""
        return self.piece * self.ranks * (2 if self.zigzag else 1)

    @property
    def local(self) -> int:
        """Number of tokens of a rank, including padding."""
        return self.padded // self.ranks

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Return the ranges of ``rank``'s pieces in the full sequence, in the order in which the rank has them."""
        pieces = (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)
        return tuple((piece * self.piece, (piece + 1) * self.piece) for piece in pieces)

    def pad(self, x: Tensor, dim: int, value: float = 0) -> Tensor:
        """Return ``x``, which has full length, with padding at its end."""
        missing = self.padded - x.shape[dim]
        if not missing:
            return x
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([x, x.new_full(shape, value)], dim)

    def take(self, x: Tensor, dim: int, rank: int, value: float = 0) -> Tensor:
        """Return ``rank``'s part of ``x``, which has full length in ``dim``.

        Args:
            x: any shape.
            dim: the sequence dimension.
            rank: the rank.
            value: value of padding.
        """
        x = self.pad(x, dim, value)
        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.ranges(rank)], dim)

    def together(self, by_rank: list[Tensor], dim: int) -> Tensor:
        """Concatenate the parts of all ranks in the order of the sequence, without padding."""
        pieces: dict[int, Tensor] = {}
        for rank, part in enumerate(by_rank):
            ranges = self.ranges(rank)
            for (start, _), piece in zip(ranges, torch.split(part, self.piece, dim), strict=True):
                pieces[start] = piece
        return torch.cat([pieces[start] for start in sorted(pieces)], dim).narrow(dim, 0, self.length)

    def gather(self, x: Tensor, dim: int, axis: SequenceAxis) -> Tensor:
        """Gather ``x`` of all ranks. Differentiable."""
        return self.together(axis.gathered(x), dim)
