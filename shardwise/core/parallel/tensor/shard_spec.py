"""Partition of tensors and of attention heads over tensor-parallel ranks: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Range = tuple[int, int]


def shares(total: int, ranks: int, unit: int = 1) -> list[int]:
    """Divide ``total`` into sizes that are multiples of ``unit``, as even as possible; the first ranks have more.

    Raises:
        ValueError: ``total`` is not a multiple of ``unit``.
    """
    if total % unit:
        raise ValueError(f"{total} elements do not divide into units of {unit}: give a size that is a multiple")
    units = total // unit
    return [(units // ranks + (rank < units % ranks)) * unit for rank in range(ranks)]


@dataclass(frozen=True)
class ShardSpec:
    """One dimension of a tensor, sharded over the ranks of an axis.

    Attributes:
        dim: the dimension.
        size: the full size of the dimension.
        ranges: the ranges ``(start, end)`` of a rank, which are concatenated, by rank. There are several if matrices
            are concatenated in one (query, key and value). Ranks may hold the same range (with fewer key/value heads
            than ranks), and all ranks together hold all indices.
    """

    dim: int
    size: int
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        covered = torch.zeros(self.size, dtype=torch.bool)
        for rank, ranges in enumerate(self.ranges):
            for start, end in ranges:
                if not 0 <= start <= end <= self.size:
                    raise ValueError(f"rank {rank} holds ({start}, {end}) of {self.size}: give ranges inside of it")
                covered[start:end] = True
        if not bool(covered.all()):
            first = int(covered.logical_not().nonzero()[0])
            raise ValueError(f"no rank holds element {first} of {self.size}: give ranges that cover everything")

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, blocks: int = 1, unit: int = 1) -> ShardSpec:
        """Divide the dimension into ``blocks`` equal blocks, each over all ranks in multiples of ``unit`` (a head's
        size).

        Raises:
            ValueError: ``size`` is not a multiple of ``blocks * unit``.
        """
        if size % (blocks * unit):
            raise ValueError(f"{size} elements do not divide into {blocks} blocks of units of {unit}")
        return cls.of_sizes(dim, [shares(size // blocks, ranks, unit)] * blocks)

    @classmethod
    def of_sizes(cls, dim: int, blocks: Sequence[Sequence[int]]) -> ShardSpec:
        """Build the partition of concatenated blocks, each with a size for every rank."""
        ranges: list[list[Range]] = [[] for _ in blocks[0]]
        start = 0
        for sizes in blocks:
            bounds = accumulate(sizes, initial=start)
            for of_rank, (first, last) in zip(ranges, pairwise(bounds), strict=True):
                of_rank.append((first, last))
            start += sum(sizes)
        return cls(dim, start, tuple(map(tuple, ranges)))

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    def numel(self, rank: int) -> int:
        """Return the number of indices of the dimension that ``rank`` holds."""
        return sum(end - start for start, end in self.ranges[rank])

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a copy of what ``rank`` holds of ``tensor``.

        Raises:
            ValueError: ``tensor`` has another size.
        """
        if tensor.shape[self.dim] != self.size:
            raise ValueError(f"{tuple(tensor.shape)} has {tensor.shape[self.dim]} in dim {self.dim}, not {self.size}")
        parts = [tensor.narrow(self.dim, start, end - start) for start, end in self.ranges[rank] or ((0, 0),)]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone()

    def unshard(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the full tensor from ``parts`` by rank; shared ranges come from the first rank that holds them."""
        tensors = list(parts)
        shape = list(tensors[0].shape)
        shape[self.dim] = self.size
        out = tensors[0].new_empty(shape)
        for rank in reversed(range(self.ranks)):
            at = 0
            for start, end in self.ranges[rank]:
                out.narrow(self.dim, start, end - start).copy_(tensors[rank].narrow(self.dim, at, end - start))
                at += end - start
        return out

    def holders(self) -> dict[Range, tuple[int, ...]]:
        """Return the ranges that several ranks hold, with these ranks."""
        by_range: dict[Range, list[int]] = {}
        for rank, ranges in enumerate(self.ranges):
            for each in ranges:
                by_range.setdefault(each, []).append(rank)
        return {each: tuple(ranks) for each, ranks in by_range.items() if len(ranks) > 1 and each[0] < each[1]}


@dataclass(frozen=True)
class SharedRanges:
    """The shared ranges of a tensor, which several ranks hold, concatenated in the same order on all ranks.

    Attributes:
        dim: the dimension.
        size: total size of the ranges in it.
        pieces: for this rank: index among the shared ranges, index in its part, and number of indices.
    """

    dim: int
    size: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one rank of an axis holds.

    Attributes:
        full_shape: the shape of the full tensor. The partition may be longer in its dimension (a padded vocabulary);
            the additional indices are zeros and do not belong to the tensor.
        cut: the partition of one of its dimensions.
        rank: the rank.
    """

    full_shape: torch.Size
    cut: ShardSpec
    rank: int

    def __post_init__(self) -> None:
        if self.full_shape[self.cut.dim] > self.cut.size:
            raise ValueError(
                f"a cut of {self.cut.size} in dim {self.cut.dim} of a tensor of {tuple(self.full_shape)}: give one of "
                f"{self.full_shape[self.cut.dim]}"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the part, with padding."""
        return self.shape_on(self.rank)

    def shape_on(self, rank: int) -> torch.Size:
        """Return the shape of another rank's part."""
        return torch.Size(self.cut.numel(rank) if at == self.cut.dim else n for at, n in enumerate(self.full_shape))

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy of the rank's part of ``tensor``, with zeros for padding."""
        missing = self.cut.size - tensor.shape[self.cut.dim]
        if missing > 0:
            shape = list(tensor.shape)
            shape[self.cut.dim] = missing
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], self.cut.dim)
        return self.cut.part(tensor, self.rank)

    def own_spans(self) -> list[Range]:
        """Return the ranges of the flattened part that no lower rank holds, in order; they may include padding."""
        holder = torch.full((self.cut.size,), self.cut.ranks)
        for rank in reversed(range(self.cut.ranks)):
            for start, end in self.cut.ranges[rank]:
                holder[start:end] = rank
        holders = torch.cat([holder[start:end] for start, end in self.cut.ranges[self.rank]] or [holder[:0]])
        own, numel = holders == self.rank, self.shape.numel()
        if bool(own.all()) or not numel:
            return [(0, numel)] if numel else []
        inner, rows = self.full_shape[self.cut.dim + 1 :].numel(), self.full_shape[: self.cut.dim].numel()
        steps = torch.cat([own.new_zeros(1), own, own.new_zeros(1)]).int().diff()
        starts, ends = ((steps == step).nonzero().flatten().tolist() for step in (1, -1))
        across = len(own) * inner
        runs = [(a * inner, b * inner) for a, b in zip(starts, ends, strict=True)]
        return [(row * across + a, row * across + b) for row in range(rows) for a, b in runs]

    def together(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the full tensor from the parts of all ranks."""
        return self.cut.unshard(parts).narrow(self.cut.dim, 0, self.full_shape[self.cut.dim])

    def shared_ranges(self) -> SharedRanges | None:
        """Return the ranges that other ranks hold as well, or ``None`` if there are none."""
        shared = sorted(self.cut.holders())
        starts = dict(zip(shared, accumulate((end - start for start, end in shared), initial=0), strict=False))
        pieces, at = [], 0
        for each in self.cut.ranges[self.rank]:
            if each in starts:
                pieces.append((starts[each], at, each[1] - each[0]))
            at += each[1] - each[0]
        return SharedRanges(self.cut.dim, sum(end - start for start, end in shared), tuple(pieces)) if shared else None


Ranges = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class Heads:
    """The query heads and the key/value heads of each rank. A rank has complete groups (a key/value head with all its
    query heads), or, with fewer groups than ranks, a part of one group.

    Attributes:
        query: the query heads ``(first, end)`` of a rank, by rank.
        kv: the key/value heads of a rank, by rank; several ranks may have the same head.
    """

    query: tuple[Range, ...]
    kv: tuple[Range, ...]

    @classmethod
    def over(cls, heads: int, kv_heads: int, ranks: int) -> Heads:
        """Divide heads over ``ranks``, as evenly as possible.

        Raises:
            ValueError: there are fewer query heads than ranks, or they are not a multiple of the key/value heads.
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
        kv_ranges: list[Range] = []
        for each, count in enumerate(shares(ranks, kv_heads)):
            query += _bounds(shares(group, count), each * group)
            kv_ranges += [(each, each + 1)] * count
        return cls(tuple(query), tuple(kv_ranges))

    def counts(self, rank: int) -> tuple[int, int]:
        """Return the numbers of query heads and of key/value heads of ``rank``."""
        (q, q_end), (kv, kv_end) = self.query[rank], self.kv[rank]
        return q_end - q, kv_end - kv

    def of_query(self, size: int) -> Ranges:
        """Return the ranges of rows of a projection to queries, with ``size`` rows per head."""
        return tuple(((first * size, end * size),) for first, end in self.query)

    def of_kv(self, size: int, blocks: int = 1, start: int = 0) -> Ranges:
        """Return those of a projection to keys or values, or to ``blocks`` of these, each with all heads."""
        width = max(end for _, end in self.kv) * size
        offsets = [start + block * width for block in range(blocks)]
        return tuple(tuple((at + first * size, at + end * size) for at in offsets) for first, end in self.kv)

    def of_all(self, size: int) -> Ranges:
        """Return those of a projection to all queries, then all keys, then all values."""
        start = max(end for _, end in self.query) * size
        return tuple(q + kv for q, kv in zip(self.of_query(size), self.of_kv(size, 2, start), strict=True))

    def of_groups(self, size: int) -> Ranges:
        """Return those of a projection to groups: the queries that share a key/value head, its key and its value."""
        group = max(end for _, end in self.query) // max(end for _, end in self.kv)
        width = (group + 2) * size
        ranges = []
        for (q, q_end), (kv, kv_end) in zip(self.query, self.kv, strict=True):
            if q_end - q == (kv_end - kv) * group:
                ranges.append(((kv * width, kv_end * width),))
            else:
                at = kv * width - kv * group * size
                own = (at + q * size, at + q_end * size)
                ranges.append((own, (kv * width + group * size, (kv + 1) * width)))  # type: ignore[arg-type]
        return tuple(ranges)


def _bounds(sizes: Sequence[int], start: int = 0) -> list[Range]:
    return list(pairwise(accumulate(sizes, initial=start)))
