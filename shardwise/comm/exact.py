"""Sums of numbers of many ranks that are exact, so that the order in which they are added makes no difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["WORDS", "end_word", "first_word", "rounded", "together", "words_of"]

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


def words_of(value: float, first: int = 0, end: int = WORDS) -> list[int]:
    """``value``, which is finite, as a whole number of the smallest, 32 bits a word, the lowest first, each with its
    sign: those from ``first`` on and before ``end``."""
    whole, sign = _whole(value), -1 if value < 0.0 else 1
    return [sign * (whole >> BITS * at & (1 << BITS) - 1) for at in range(first, end)]


def first_word(value: float) -> int:
    """Where :func:`words_of` has the first that is not zero; :data:`WORDS` of zero and of what is not finite."""
    whole = _whole(value) if math.isfinite(value) else 0
    return ((whole & -whole).bit_length() - 1) // BITS if whole else WORDS


def end_word(value: float) -> int:
    """Behind the last word of :func:`words_of` that is not zero, of a finite value and of all that are smaller."""
    return -(-_whole(value).bit_length() // BITS)


def _whole(value: float) -> int:
    numerator, denominator = abs(value).as_integer_ratio()
    return numerator << SHIFT + 1 - denominator.bit_length()


def rounded(words: Sequence[int], first: int = 0) -> float:
    """The fp64 number next to the sum of which these are the words from ``first`` on, each a sum of words; what
    :func:`math.fsum` gives. Infinite where that is too large."""
    try:
        return sum(word << BITS * at for at, word in enumerate(words, first)) / (1 << SHIFT)
    except OverflowError:
        return math.inf
