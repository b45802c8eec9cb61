"""Which attention heads each rank has, and where they are in the rows of a projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardwise.core.parallel.tensor.cut import Range, shares

__all__ = ["Heads"]

Ranges = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class Heads:
    """Query heads, and the key/value heads that they read, by rank. A rank has whole groups (a key/value head with all
    its query heads), or where there are fewer of these than ranks, a part of one group.

    Attributes:
        query: by rank, its query heads ``(first, end)``.
        kv: by rank, its key/value heads; several ranks may have the same one.
    """

    query: tuple[Range, ...]
    kv: tuple[Range, ...]

    @classmethod
    def over(cls, heads: int, kv_heads: int, ranks: int) -> Heads:
        """As even as can be.

        Raises:
            ValueError: there are fewer query heads than ranks, or no whole number of them for a key/value head.
        """
        if heads < ranks:
            raise ValueError(f"{heads} attention heads are fewer than {ranks} ranks; cut over {heads} ranks at most")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} attention heads do not divide into groups for {kv_heads} key/value heads")
        group = heads // kv_heads
        if kv_heads >= ranks:
            kv = _bounds(shares(kv_heads, ranks))
            return cls(tuple((first * group, end * group) for first, end in kv), tuple(kv))
        query: list[Range] = []
        held: list[Range] = []
        for each, count in enumerate(shares(ranks, kv_heads)):
            query += _bounds(shares(group, count), each * group)
            held += [(each, each + 1)] * count
        return cls(tuple(query), tuple(held))

    def counts(self, rank: int) -> tuple[int, int]:
        """Query heads and key/value heads of ``rank``."""
        (q, q_end), (kv, kv_end) = self.query[rank], self.kv[rank]
        return q_end - q, kv_end - kv

    def of_query(self, size: int) -> Ranges:
        """Rows of a projection to queries of ``size`` elements a head."""
        return tuple(((first * size, end * size),) for first, end in self.query)

    def of_kv(self, size: int, blocks: int = 1, start: int = 0) -> Ranges:
        """The same to keys or values, or to ``blocks`` of these, each with all heads."""
        width = max(end for _, end in self.kv) * size
        offsets = [start + block * width for block in range(blocks)]
        return tuple(tuple((at + first * size, at + end * size) for at in offsets) for first, end in self.kv)

    def of_all(self, size: int) -> Ranges:
        """The same to all queries, behind them all keys, behind them all values."""
        start = max(end for _, end in self.query) * size
        return tuple(q + kv for q, kv in zip(self.of_query(size), self.of_kv(size, 2, start), strict=True))

    def of_groups(self, size: int) -> Ranges:
        """The same to groups: the queries that share a key/value head, this one's key and its value."""
        group = max(end for _, end in self.query) // max(end for _, end in self.kv)
        width = (group + 2) * size
        found = []
        for (q, q_end), (kv, kv_end) in zip(self.query, self.kv, strict=True):
            if q_end - q == (kv_end - kv) * group:
                found.append(((kv * width, kv_end * width),))
            else:
                at = kv * width - kv * group * size
                own = (at + q * size, at + q_end * size)
                found.append((own, (kv * width + group * size, (kv + 1) * width)))  # type: ignore[arg-type]
        return tuple(found)


def _bounds(sizes: Sequence[int], start: int = 0) -> list[Range]:
    return list(pairwise(accumulate(sizes, initial=start)))
