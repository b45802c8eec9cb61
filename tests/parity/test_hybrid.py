"""Architectures that no other test trains, over every way to divide a model; ``python -m tests.parity`` has all.

Quick: two layouts that use every axis. Full: every layout once, with one of two architectures. Campaign: every layout
with both.
"""

import pytest

from shardwise.testing import run_ranks
from tests.parity.hybrid import LAYOUTS, Found, measured

FOUR = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 4]
EIGHT = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 8]


def right(by_rank: list[list[Found]], layouts: list[str]) -> None:
    for found in by_rank:
        assert [each.layout for each in found] == layouts
        assert not [f"{each.layout}: {each.wrong}" for each in found if each.wrong]


# What each axis does once, with all that is sent along it.
QUICK = ["tp2pp2x2 sequences", "dp2tp2 zero3"]
TURNS = {"falcon": FOUR[::2], "mixtral": FOUR[1::2]}


def test_an_architecture_over_all_axes_equals_one_process() -> None:
    right(run_ranks(4, measured, "mixtral", QUICK, ["float64"], timeout=300.0), QUICK)


@pytest.mark.full
@pytest.mark.parametrize("architecture", TURNS)
def test_every_layout_equals_one_process(architecture: str) -> None:
    """Each with one of two architectures."""
    layouts = TURNS[architecture]
    right(run_ranks(4, measured, architecture, layouts, ["float64"], timeout=300.0), layouts)


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", TURNS)
def test_every_layout_with_every_architecture_equals_one_process(architecture: str) -> None:
    right(run_ranks(4, measured, architecture, FOUR, ["float64"], timeout=300.0), FOUR)


@pytest.mark.full
def test_three_axes_of_two_equal_one_process() -> None:
    right(run_ranks(8, measured, "llama", EIGHT, ["float64"], timeout=300.0), EIGHT)
