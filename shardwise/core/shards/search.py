"""Gemini's chunk-size search: the uniform size that wastes least space at the ends of chunks.

Source: the behaviour of ColossalAI's ``search_chunk_configuration`` (the argument table of ``GeminiPlugin``): start at
the largest parameter once outliers above mean + 3 sigma are dropped, step by ``interval``, keep the least waste.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.plan import BySearch

__all__ = ["search_chunk_numel", "waste_numel"]


def waste_numel(numels: Sequence[int], chunk_numel: int) -> int:
    """Elements left empty when ``numels`` are packed in order into chunks of ``chunk_numel``; larger ones go alone."""
    waste = 0
    used = 0
    for numel in numels:
        if numel > chunk_numel:
            continue
        if used + numel > chunk_numel:
            waste += chunk_numel - used
            used = 0
        used += numel
    return waste + (chunk_numel - used if used else 0)


def search_chunk_numel(numels: Sequence[int], packing: BySearch) -> int:
    """The chunk size in elements; ties go to the smaller one. A model below the minimum is one chunk."""
    total = sum(numels)
    if total <= packing.min_chunk_numel:
        return max(total, 1)
    mean = total / len(numels)
    sigma = math.sqrt(sum((n - mean) ** 2 for n in numels) / len(numels))
    largest = max(n for n in numels if n <= mean + 3 * sigma)
    interval = packing.interval_numel
    start = math.ceil(max(packing.min_chunk_numel, largest) / interval) * interval
    candidates = range(start, start + packing.search_range_numel + 1, interval)
    return min(candidates, key=lambda size: (waste_numel(numels, size), size))
