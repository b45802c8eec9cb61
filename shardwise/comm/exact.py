"""Sums of numbers of many ranks that are exact, so that the order in which they are added makes no difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["WORDS", "rounded", "together", "words_of"]

SHIFT = 1074
"""The smallest fp64 number is 2 to the power of minus this."""
BITS = 32
"""Of a number in each word; so 2**31 ranks' words can be added in 63 bits."""
WORDS = -(-(SHIFT + 1024) // BITS)


def together(values: Sequence[float], largest: bool) -> float:
    """Numbers made one: their sum, rounded once, so that their order makes no difference; or the largest.
    NaN where one is."""
    if any(math.isnan(value) for value in values):
        return math.nan
    if largest or math.inf in values:
        return max(values)
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def words_of(value: float) -> list[int]:
    """``value``, which is finite, as a whole number of the smallest, 32 bits a word, the lowest first, each with its
    sign."""
    numerator, denominator = abs(value).as_integer_ratio()
    whole, sign = numerator * ((1 << SHIFT) // denominator), -1 if value < 0.0 else 1
    return [sign * (whole >> BITS * at & (1 << BITS) - 1) for at in range(WORDS)]


def rounded(words: Sequence[int]) -> float:
    """The fp64 number next to the sum of which these are the words, each a sum of words; what :func:`math.fsum` gives.
    Infinite where that is too large."""
    try:
        return sum(word << BITS * at for at, word in enumerate(words)) / (1 << SHIFT)
    except OverflowError:
        return math.inf
