"""A 64-bit checksum of bytes that runs at memory speed in numpy.

A multilinear hash modulo 2^64 in levels: each row of 2048 words is reduced to the sum of its words, each times a fixed
odd weight; the row sums are mixed and hashed the same way, until one word is left. The weights depend on the position,
so swapped words, pages or rows are detected. As odd weights have inverses, a change inside a single word is always
detected. Fixed weights protect against faults, not against intentional collisions.

Source: multilinear hashing (Carter and Wegman 1979; Lemire and Kaser, arXiv 1202.4961).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

ROW_WORDS = 2048  # a row and its weights fit the first-level cache
ROW_WEIGHTS: Words = np.random.Generator(np.random.PCG64(20_260_101)).integers(
    0, 2**63, size=ROW_WORDS, dtype=np.uint64
) * np.uint64(2) + np.uint64(1)
_SHIFT = np.uint64(29)


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Return the checksum of contiguous ``data`` (uint8, any length; fastest if its address is a multiple of 8)."""
    aligned = data.nbytes // 8 * 8
    result = int(_hash(data[:aligned].view(np.uint64)))
    # The length and the last few bytes, which must count even if the words are zero.
    tail = int.from_bytes(data[aligned:].tobytes(), "little") | 1 << 8 * (data.nbytes - aligned)
    # Odd constants are invertible, so a product with one loses no information.
    return (result * 0x9E3779B97F4A7C15 + tail * 0xD1B54A32D192ED03 + data.nbytes) % 2**64


def _hash(words: Words) -> np.uint64:
    while len(words) > ROW_WORDS:
        full_rows = len(words) // ROW_WORDS * ROW_WORDS
        # einsum's loop over two contiguous rows is the fastest product of integers in numpy.
        sums: Words = np.einsum("ij,j->i", words[:full_rows].reshape(-1, ROW_WORDS), ROW_WEIGHTS)
        if full_rows < len(words):
            sums = np.append(sums, _dot(words[full_rows:]))
        # Without mixing, the levels would be linear together, and rectangles of changes could cancel.
        words = sums ^ (sums >> _SHIFT)
    return _dot(words)


def _dot(words: Words) -> np.uint64:
    return np.dot(words, ROW_WEIGHTS[: len(words)])  # type: ignore[no-any-return]
