"""The chunk-size search against trying everything."""

from __future__ import annotations

import math
import statistics

from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.core.shards.layout import search_chunk_numel
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
