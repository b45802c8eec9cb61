"""The chunk-size search against trying everything."""

from __future__ import annotations

import math
import statistics

from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.core.shards.layout import search_chunk_numel, waste_numel
from shardwise.plan import BySearch


def fill(numels: list[int], size: int) -> int:
    """Put them into bins one by one and count what stays empty; those that never fit are left out."""
    bins: list[int] = []
    for numel in numels:
        if numel > size:
            continue
        if not bins or bins[-1] + numel > size:
            bins.append(0)
        bins[-1] += numel
    return sum(size - used for used in bins if used)


def brute_force(numels: list[int], packing: BySearch) -> int:
    mean, sigma = statistics.fmean(numels), statistics.pstdev(numels)
    largest = max(n for n in numels if n <= mean + 3 * sigma + 1e-9)
    size = math.ceil(max(largest, packing.min_chunk_numel) / packing.interval_numel) * packing.interval_numel
    last = size + packing.search_range_numel
    best = size
    while size <= last:
        if fill(numels, size) < fill(numels, best):
            best = size
        size += packing.interval_numel
    return best


numels = st.lists(st.integers(0, 300), min_size=1, max_size=20)


@given(numels, st.integers(0, 200), st.integers(1, 40), st.integers(1, 300))
def test_equals_brute_force(sizes: list[int], range_: int, interval: int, smallest: int) -> None:
    assume(sum(sizes) > smallest)
    packing = BySearch(search_range_numel=range_, interval_numel=interval, min_chunk_numel=smallest)
    assert search_chunk_numel(sizes, packing) == brute_force(sizes, packing)


@given(numels, st.integers(1, 400))
def test_waste(sizes: list[int], size: int) -> None:
    assert waste_numel(sizes, size) == fill(sizes, size)


def test_examples() -> None:
    packing = BySearch(search_range_numel=20, interval_numel=5, min_chunk_numel=10)
    assert search_chunk_numel([10] * 6, packing) == 10  # 10, 20 and 30 waste nothing: the smallest
    assert search_chunk_numel([7] * 6, packing) == 15  # 14 of 15 used; 10 wastes more, and so do 20, 25 and 30
    assert search_chunk_numel([3, 4], packing) == 7  # all of it is below the minimum: one chunk
    assert search_chunk_numel([0], packing) == 1
    # An outlier above mean + 3 sigma does not set the size.
    assert search_chunk_numel([10] * 30 + [10000], packing) == 10
