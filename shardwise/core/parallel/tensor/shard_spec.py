"""Which part of a tensor, and which attention heads, each tensor-parallel rank holds: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

__all__ = [
    "Heads",
    "Held",
    "Part",
    "ShardSpec",
    "shares",
]

Range = tuple[int, int]


def shares(total: int, ranks: int, unit: int = 1) -> list[int]:
    """Sizes that add up to ``total``, in multiples of ``unit``, as even as can be; the first ranks have more.

    Raises:
        ValueError: ``total`` is no multiple of ``unit``.
    """
    if total % unit:
        raise ValueError(f"{total} elements do not divide into units of {unit}: give a size that is a multiple")
    units = total // unit
    return [(units // ranks + (rank < units % ranks)) * unit for rank in range(ranks)]


@dataclass(frozen=True)
class ShardSpec:
    """One dimension of a tensor, cut over the ranks of an axis.

    Attributes:
        dim: the dimension.
        size: elements in the whole of it.
        ranges: by rank, the ranges ``(start, end)`` of the whole that it holds, one behind the other. Several where
            matrices lie side by side in one (query, key and value); ranks may hold the same range (keys and values of
            which there are fewer heads than ranks), and all of them together hold everything.
    """

    dim: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        held = torch.zeros(self.size, dtype=torch.bool)
        for rank, ranges in enumerate(self.ranges):
            for start, end in ranges:
                if not 0 <= start <= end <= self.size:
                    raise ValueError(f"rank {rank} holds ({start}, {end}) of {self.size}: give ranges inside of it")
                held[start:end] = True
        if not bool(held.all()):
            first = int(held.logical_not().nonzero()[0])
            raise ValueError(f"no rank holds element {first} of {self.size}: give ranges that cover everything")

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, blocks: int = 1, unit: int = 1) -> ShardSpec:
        """``blocks`` equal parts side by side, each over all ranks in multiples of ``unit`` (a head's size).

        Raises:
            ValueError: ``size`` is no multiple of ``blocks * unit``.
        """
        if size % (blocks * unit):
            raise ValueError(f"{size} elements do not divide into {blocks} blocks of units of {unit}")
        return cls.of_sizes(dim, [shares(size // blocks, ranks, unit)] * blocks)

    @classmethod
    def of_sizes(cls, dim: int, blocks: Sequence[Sequence[int]]) -> ShardSpec:
        """Parts side by side, each with a size for every rank."""
        ranges: list[list[Range]] = [[] for _ in blocks[0]]
        start = 0
        for sizes in blocks:
            bounds = accumulate(sizes, initial=start)
            for held, (first, last) in zip(ranges, pairwise(bounds), strict=True):
                held.append((first, last))
            start += sum(sizes)
        return cls(dim, start, tuple(map(tuple, ranges)))

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    def numel(self, rank: int) -> int:
        """Elements of the dimension that ``rank`` holds."""
        return sum(end - start for start, end in self.ranges[rank])

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """What ``rank`` holds of ``whole``, a copy.

        Raises:
            ValueError: ``whole`` has another size.
        """
        if whole.shape[self.dim] != self.size:
            raise ValueError(f"{tuple(whole.shape)} has {whole.shape[self.dim]} in dim {self.dim}, not {self.size}")
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges[rank] or ((0, 0),)]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone()

    def whole(self, parts: Iterable[Tensor]) -> Tensor:
        """The tensor that ``parts`` (by rank) are of; of what several hold, the first one's."""
        held = list(parts)
        shape = list(held[0].shape)
        shape[self.dim] = self.size
        out = held[0].new_empty(shape)
        for rank in reversed(range(self.ranks)):
            at = 0
            for start, end in self.ranges[rank]:
                out.narrow(self.dim, start, end - start).copy_(held[rank].narrow(self.dim, at, end - start))
                at += end - start
        return out

    def holders(self) -> dict[Range, tuple[int, ...]]:
        """The ranges that several ranks hold alike, with these ranks."""
        by_range: dict[Range, list[int]] = {}
        for rank, ranges in enumerate(self.ranges):
            for each in ranges:
                by_range.setdefault(each, []).append(rank)
        return {each: tuple(ranks) for each, ranks in by_range.items() if len(ranks) > 1 and each[0] < each[1]}


@dataclass(frozen=True)
class Held:
    """What several ranks hold alike of a tensor, one behind the other: the same on all ranks, the pieces apart.

    Attributes:
        dim: the dimension.
        size: elements of it.
        pieces: of this rank: where among these, where in its part, and how many.
    """

    dim: int
    size: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Part:
    """What one rank of an axis holds of a tensor.

    Attributes:
        whole: the tensor's shape. The cut may be longer in its dimension (a padded vocabulary); the rest is zero, and
            no part of the tensor.
        cut: of one of its dimensions.
        rank: which rank's.
    """

    whole: torch.Size
    cut: ShardSpec
    rank: int

    def __post_init__(self) -> None:
        if self.whole[self.cut.dim] > self.cut.size:
            raise ValueError(
                f"a cut of {self.cut.size} in dim {self.cut.dim} of a tensor of {tuple(self.whole)}: give one of "
                f"{self.whole[self.cut.dim]}"
            )

    @property
    def shape(self) -> torch.Size:
        """Of what the rank holds, with padding."""
        return self.shape_on(self.rank)

    def shape_on(self, rank: int) -> torch.Size:
        """Of what another rank holds."""
        return torch.Size(self.cut.numel(rank) if at == self.cut.dim else n for at, n in enumerate(self.whole))

    def of(self, whole: Tensor) -> Tensor:
        """What the rank holds of ``whole``, a copy, with zeros for padding."""
        missing = self.cut.size - whole.shape[self.cut.dim]
        if missing > 0:
            shape = list(whole.shape)
            shape[self.cut.dim] = missing
            whole = torch.cat([whole, whole.new_zeros(shape)], self.cut.dim)
        return self.cut.part(whole, self.rank)

    def own_spans(self) -> list[Range]:
        """The ranges of the flattened part that no lower rank holds too, in order; padding may be among them."""
        holder = torch.full((self.cut.size,), self.cut.ranks)
        for rank in reversed(range(self.cut.ranks)):
            for start, end in self.cut.ranges[rank]:
                holder[start:end] = rank
        held = torch.cat([holder[start:end] for start, end in self.cut.ranges[self.rank]] or [holder[:0]])
        own, numel = held == self.rank, self.shape.numel()
        if bool(own.all()) or not numel:
            return [(0, numel)] if numel else []
        inner, rows = self.whole[self.cut.dim + 1 :].numel(), self.whole[: self.cut.dim].numel()
        steps = torch.cat([own.new_zeros(1), own, own.new_zeros(1)]).int().diff()
        starts, ends = ((steps == step).nonzero().flatten().tolist() for step in (1, -1))
        across = len(own) * inner
        runs = [(a * inner, b * inner) for a, b in zip(starts, ends, strict=True)]
        return [(row * across + a, row * across + b) for row in range(rows) for a, b in runs]

    def together(self, parts: Iterable[Tensor]) -> Tensor:
        """The tensor that all ranks' ``parts`` are of."""
        return self.cut.whole(parts).narrow(self.cut.dim, 0, self.whole[self.cut.dim])

    def held(self) -> Held | None:
        """What other ranks hold as well; ``None``: no two ranks hold the same."""
        shared = sorted(self.cut.holders())
        starts = dict(zip(shared, accumulate((end - start for start, end in shared), initial=0), strict=False))
        pieces, at = [], 0
        for each in self.cut.ranges[self.rank]:
            if each in starts:
                pieces.append((starts[each], at, each[1] - each[0]))
            at += each[1] - each[0]
        return Held(self.cut.dim, sum(end - start for start, end in shared), tuple(pieces)) if shared else None


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
