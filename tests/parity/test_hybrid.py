"""Architectures that no other test trains, over every way to divide a model; ``python -m tests.parity`` has all."""

from __future__ import annotations

import pytest

from shardwise.testing import run_ranks
from tests.parity.hybrid import LAYOUTS, Found, measured

FOUR = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 4]
EIGHT = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 8]


def right(by_rank: list[list[Found]], layouts: list[str]) -> None:
    for found in by_rank:
        assert [each.layout for each in found] == layouts
        assert not [f"{each.layout}: {each.wrong}" for each in found if each.wrong]


@pytest.mark.parametrize("architecture", ["falcon", "mixtral"])
def test_every_layout_equals_one_process(architecture: str) -> None:
    right(run_ranks(4, measured, architecture, FOUR, ["float64"], timeout=300.0), FOUR)


def test_three_axes_of_two_equal_one_process() -> None:
    right(run_ranks(8, measured, "llama", EIGHT, ["float64"], timeout=300.0), EIGHT)
