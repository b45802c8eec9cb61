"""The checksum is its definition, and every kind of change is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.memory.disk.checksum import _ROW_WORDS, _WEIGHTS, checksum

ROW = 8 * _ROW_WORDS


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def by_definition(data: bytes, row_words: int = _ROW_WORDS) -> int:
    """The same in plain integers."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    while len(words) > row_words:
        rows = [words[i : i + row_words] for i in range(0, len(words), row_words)]
        sums = [sum(w * int(k) for w, k in zip(row, _WEIGHTS, strict=False)) % 2**64 for row in rows]
        words = [s ^ (s >> 29) for s in sums]
    result = sum(w * int(k) for w, k in zip(words, _WEIGHTS, strict=False)) % 2**64
    rest = data[len(data) // 8 * 8 :]
    tail = int.from_bytes(rest, "little") + 256 ** len(rest)
    return (result * 0x9E3779B97F4A7C15 + tail * 0xD1B54A32D192ED03 + len(data)) % 2**64


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 1, 3 * ROW + 13, 2**20])
def test_it_is_its_definition(nbytes: int) -> None:
    data = random_bytes(nbytes)
    assert checksum(data) == by_definition(data.tobytes())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4 * ROW), st.data())
def test_every_single_change_is_found(nbytes: int, choose: st.DataObject) -> None:
    data = random_bytes(nbytes)
    before = checksum(data)
    data[choose.draw(st.integers(0, nbytes - 1))] ^= choose.draw(st.integers(1, 255))
    assert checksum(data) != before


@pytest.mark.parametrize("size", [1, 8, 512, 4096, ROW, 5 * ROW])
def test_swaps_and_shifts_are_found(size: int) -> None:
    data = random_bytes(20 * ROW)
    before = checksum(data)
    for first, second in ((0, size), (0, 2 * size), (ROW, ROW + size), (size, 3 * size)):
        other = data.copy()
        other[first : first + size], other[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
        assert checksum(other) != before
    assert checksum(np.roll(data, size)) != before
