"""Stored order of a sharded tensor, and reads of parts and of the full tensor from it: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.parallel.tensor.shard_spec import Part, Range, ShardSpec

ReadInto = Callable[[int, Tensor], None]
"""Reads elements ``[start, start + out.numel())`` in stored order into ``out`` (1-D, contiguous)."""

BLOCK_NUMEL = 1 << 20
"""Number of elements per read when only some of their columns are needed."""
WIDE_NUMEL = 1 << 15
"""Minimal number of contiguous elements for which a separate read is worth its cost."""


# [Note: Stored order]
# A rank's shard is a range of its flattened tensor-parallel part. If a tensor is sharded along its first dimension,
# this is a range of the flattened full tensor, too. If a matrix is sharded along its columns, it would be a short range
# in each of many rows, and a file would contain one piece for each row. Such a tensor is therefore stored part by part,
# with each part flattened separately, without padding. Elements that several ranks hold are stored only in the part of
# the first of these ranks. Each rank's shard is then one contiguous range of the file again.
@dataclass(frozen=True)
class StoredCut:
    """The stored order of a sharded tensor: part by part, each in row-major order.

    Attributes:
        dim: the sharded dimension.
        ranges: for each part, the non-empty ranges ``(start, end)`` of that dimension. All parts together contain each
            index exactly once. A part may be empty.
    """

    dim: int
    ranges: tuple[tuple[Range, ...], ...]

    def fields(self) -> list[Any]:
        """Return the fields as JSON-compatible values."""
        return [self.dim, [[list(each) for each in part] for part in self.ranges]]

    @classmethod
    def read(cls, fields: Any) -> StoredCut:
        """Build the object from the return value of :meth:`fields`; call :meth:`check` to validate it.

        Raises:
            TypeError, ValueError: ``fields`` has another structure.
        """
        dim, parts = fields
        ranges = tuple(tuple((start, end) for start, end in part) for part in parts)
        for number in (dim, *(n for part in ranges for each in part for n in each)):
            if type(number) is not int:
                raise TypeError(f"a {type(number).__name__} where a cut has a whole number")
        return cls(dim, ranges)

    def check(self, shape: Sequence[int]) -> None:
        """Check that this is a partition of a tensor of ``shape``.

        Raises:
            ValueError: the cut does not fit the tensor.
        """
        if not 0 <= self.dim < len(shape):
            raise ValueError(f"a cut in dim {self.dim} of a tensor of shape {tuple(shape)}")
        at = 0
        for start, end in sorted(each for part in self.ranges for each in part):
            if start != at or end <= start:
                raise ValueError(f"a cut with ({start}, {end}) where {at} should follow, of {shape[self.dim]}")
            at = end
        if at != shape[self.dim]:
            raise ValueError(f"a cut of {at} in dim {self.dim} of a tensor of shape {tuple(shape)}")

    @classmethod
    def of(cls, shape: Sequence[int], cut: ShardSpec) -> StoredCut | None:
        """Return the stored order of a full tensor of ``shape`` sharded by ``cut``; None: row-major order."""
        if prod(shape[: cut.dim]) <= 1 or not prod(shape):
            return None
        parts = tuple(_merged((start, end) for _, start, end in _owned(cut, rank, shape)) for rank in range(cut.ranks))
        if [each for part in parts for each in part] == [(0, shape[cut.dim])]:
            return None
        return cls(cut.dim, parts)


class Run(NamedTuple):
    """``numel`` contiguous elements that start at ``stored`` in stored order and at ``local`` in a part."""

    stored: int
    local: int
    numel: int


def own_runs(part: Part, start: int, end: int) -> list[Run]:
    """Return the runs that a rank stores of elements ``[start, end)`` of its flattened part. Padding, and elements that
    an earlier rank of the axis holds as well, are not stored."""
    as_it_is, base, width, places = _places(part)
    if as_it_is:
        return [Run(base + start, start, end - start)] if start < end else []
    return _merged_runs(_runs(part, start, end, places, base, width))


def full_runs(part: Part, start: int, end: int) -> list[Run]:
    """Return where elements ``[start, end)`` of a rank's flattened part are in the flattened full tensor, without
    padding."""
    cut, size = part.cut, part.full_shape[part.cut.dim]
    places, at = [], 0
    for first, last in cut.ranges[part.rank]:
        places.append((at, first, max(min(last, size) - first, 0)))
        at += last - first
    return _merged_runs(_runs(part, start, end, places, 0, size))


def read_logical(read: ReadInto, shape: Sequence[int], stored: StoredCut | None, start: int, out: Tensor) -> None:
    """Read elements ``[start, start + out.numel())`` of the flattened full tensor into ``out`` (1-D, contiguous).

    ``read`` is called for a few ranges per block, sequentially within each stored part.
    """
    if stored is not None:
        _Columns.of(tuple(shape), stored.dim, stored.ranges, ((0, shape[stored.dim]),)).read(read, start, out)
    elif out.numel():
        read(start, out)


def read_part(read: ReadInto, stored: StoredCut | None, part: Part, start: int, out: Tensor) -> None:
    """Read elements ``[start, start + out.numel())`` of a rank's flattened part into ``out`` (1-D, contiguous). Padding
    is filled with zeros.

    Args:
        read: reads the full tensor in stored order.
        stored: the stored order; ``None``: row-major order.
        part: the part of the rank.
    """
    shape, dim = tuple(part.full_shape), part.cut.dim
    lying, ranges = stored, part.cut.ranges[part.rank]
    if lying is not None and lying.dim != dim:
        of_stored = read

        def read(start: int, out: Tensor) -> None:
            read_logical(of_stored, shape, stored, start, out)

        lying = None
    there = ((((0, shape[dim]),) if shape[dim] else ()),) if lying is None else lying.ranges
    _Columns.of(shape, dim, there, ranges).read(read, start, out)


def extract_part(full: Tensor, part: Part, start: int, numel: int) -> Tensor:
    """Return elements ``[start, start + numel)`` of a rank's flattened part of ``full`` as a new tensor."""
    flat = full.detach().reshape(-1)
    out = torch.empty(numel, dtype=flat.dtype, device=flat.device)

    def read(start: int, out: Tensor) -> None:
        out.copy_(flat[start : start + out.numel()])

    read_part(read, None, part, start, out)
    return out


# ---- which rank stores what

Place = tuple[int, int, int]
"""Index in the part, index in the stored order, and number of indices."""


def _owned(cut: ShardSpec, rank: int, shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ``(index in the part, start, end)`` of the full ranges that ``rank`` is the first to hold."""
    size = shape[cut.dim]
    before = [each for ranges in cut.ranges[:rank] for each in ranges]
    owned, at = [], 0
    for start, end in cut.ranges[rank]:
        first = start
        for left, right in (*_merged(sorted(before)), (size, size)):
            stop = min(left, end, size)
            if first < stop:
                owned.append((at + first - start, first, stop))
            first = max(first, min(right, end))
        before.append((start, end))
        at += end - start
    return owned


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Merge adjacent ranges and drop empty ones."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] >= start >= merged[-1][0]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return tuple(merged)


@lru_cache(maxsize=4096)
def _places(part: Part) -> tuple[bool, int, int, list[Place]]:
    """Locate what this rank stores of ``part``.

    Returns:
        Whether the part is stored contiguously and unchanged, the offset of its first element, the number of indices in
        a row of the stored part (of the full tensor if that is stored in row-major order), and the places of the
        indices that this rank stores.
    """
    cut, shape = part.cut, part.full_shape
    owned = _owned(cut, part.rank, shape)
    if StoredCut.of(shape, cut) is None:
        return False, 0, shape[cut.dim], [(at, start, end - start) for at, start, end in owned]
    rows = prod(shape[: cut.dim]) * prod(shape[cut.dim + 1 :])
    earlier = sum(end - start for rank in range(part.rank) for _, start, end in _owned(cut, rank, shape))
    sizes = [end - start for _, start, end in owned]
    places = list(zip((at for at, _, _ in owned), accumulate(sizes, initial=0), sizes, strict=False))
    return sum(sizes) == cut.numel(part.rank), earlier * rows, sum(sizes), places


def _runs(part: Part, start: int, end: int, places: Sequence[Place], base: int, width: int) -> list[Run]:
    """Return the runs for elements ``[start, end)`` of a flattened part; a stored row has ``width`` indices."""
    element = prod(part.full_shape[part.cut.dim + 1 :])
    row, runs = part.cut.numel(part.rank) * element, list[Run]()
    for number in range(start // row, -(-end // row)) if start < end else ():
        for local, there, numel in places:
            first, last = number * row + local * element, number * row + (local + numel) * element
            left, right = max(first, start), min(last, end)
            if left < right:
                runs.append(Run(base + (number * width + there) * element + left - first, left, right - left))
    return runs


def _merged_runs(runs: Sequence[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and (last.stored + last.numel, last.local + last.numel) == (run.stored, run.local):
            merged[-1] = Run(last.stored, last.local, last.numel + run.numel)
        else:
            merged.append(run)
    return merged


# ---- reading


class _Overlap(NamedTuple):
    """``numel`` elements of a row that are contiguous both in the requested order and in a stored part."""

    requested: int
    part: int
    stored: int
    numel: int


class _Columns:
    """Reads some columns of a tensor that is stored in parts of columns. The tensor is treated as a matrix: the
    dimensions before the sharded one are its rows, and the others form a row."""

    def __init__(
        self, shape: tuple[int, ...], dim: int, there: tuple[tuple[Range, ...], ...], columns: tuple[Range, ...]
    ) -> None:
        rows, element = prod(shape[:dim]), prod(shape[dim + 1 :])
        self.row = sum(end - start for start, end in columns) * element
        self.rows_there = [sum(end - start for start, end in ranges) * element for ranges in there]
        self.bases = list(accumulate((rows * width for width in self.rows_there), initial=0))
        lying = sorted(
            (start, end, number, at - (end - start))
            for number, ranges in enumerate(there)
            for (start, end), at in zip(ranges, accumulate(end - start for start, end in ranges), strict=True)
        )
        self.overlaps: list[_Overlap] = []
        at = 0
        for start, end in columns:
            for first, last, number, place in lying:
                left, right = max(start, first), min(end, last)
                if left < right:
                    self.overlaps.append(
                        _Overlap(
                            (at + left - start) * element,
                            number,
                            (place + left - first) * element,
                            (right - left) * element,
                        )
                    )
            at += end - start
        self.by_part: dict[int, list[_Overlap]] = {}
        for each in self.overlaps:
            self.by_part.setdefault(each.part, []).append(each)
        self.padded = sum(each.numel for each in self.overlaps) < self.row
        self.wide = bool(self.overlaps) and min(each.numel for each in self.overlaps) >= WIDE_NUMEL

    @staticmethod
    @lru_cache(maxsize=256)
    def of(
        shape: tuple[int, ...], dim: int, there: tuple[tuple[Range, ...], ...], columns: tuple[Range, ...]
    ) -> _Columns:
        """Return a cached instance, since this is called for every tile."""
        return _Columns(shape, dim, there, columns)

    def read(self, read: ReadInto, start: int, out: Tensor) -> None:
        end = start + out.numel()
        if start >= end:
            return
        if self.padded:
            out.zero_()
        first, last = -(-start // self.row), end // self.row
        if first >= last or self.wide:  # no complete row, or ranges so long that reading rows together does not help
            for number in range(start // self.row, -(-end // self.row)):
                self._row(read, number, start, out)
            return
        if start < first * self.row:
            self._row(read, first - 1, start, out[: first * self.row - start])
        self._rows(read, first, out[first * self.row - start : last * self.row - start].view(last - first, self.row))
        if last * self.row < end:
            self._row(read, last, last * self.row, out[last * self.row - start :])

    def _row(self, read: ReadInto, number: int, start: int, out: Tensor) -> None:
        """Read the elements of one row that are in ``out``, whose first element is ``start``."""
        at, end = number * self.row, start + out.numel()
        for each in self.overlaps:
            left, right = max(at + each.requested, start), min(at + each.requested + each.numel, end)
            if left < right:
                there = self.bases[each.part] + number * self.rows_there[each.part] + each.stored
                read(there + left - at - each.requested, out[left - start : right - start])

    def _rows(self, read: ReadInto, first: int, out: Tensor) -> None:
        """Read complete rows, starting with ``first``, block by block from each stored part that has some of them."""
        for part, own in self.by_part.items():
            width = self.rows_there[part]
            base = self.bases[part] + first * width
            if own == [_Overlap(0, part, 0, self.row)] and width == self.row:
                read(base, out.view(-1))  # stored in the requested order
                continue
            step = min(max(BLOCK_NUMEL // width, 1), len(out))
            memory = torch.empty(step * width, dtype=out.dtype, device=out.device)
            for at in range(0, len(out), step):
                count = min(step, len(out) - at)
                block = memory[: count * width]
                read(base + at * width, block)
                for each in own:
                    to = out[at : at + count, each.requested : each.requested + each.numel]
                    to.copy_(block.view(count, width)[:, each.stored : each.stored + each.numel])
