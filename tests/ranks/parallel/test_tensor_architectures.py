"""Models of every architecture, with every head, cut over two and four ranks against the same models whole, in fp64,
with whole sequences and with divided ones.

Quick: the first head of every architecture over two ranks. Full: every head, over two or four. Campaign: over both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.core.parallel.tensor import Axis
from shardwise.plan import TensorPlan
from shardwise.testing import run_ranks
from tests.support.scope import Scope
from tests.support.sets import campaign, full
from tests.support.tensor_cases import CASES
from tests.support.tensor_setup import compare


def compared(architecture: str) -> int:
    """All cases of an architecture, logits cut and gathered by turns, sequences whole and divided by turns."""
    cases = CASES[architecture]()
    with Scope("shared") as group:
        axis = Axis(group)
        for at, case in enumerate(cases):
            plan = TensorPlan(parallel_output=at % 2 == axis.size // 4 % 2, vocabulary_multiple=(4, 64)[at % 2])
            divided = [replace(plan, sequence="split_gather")] if at == 0 or at % 2 else []
            assert compare(case, axis, plan, *divided)
    return len(cases)


def first_ones() -> list[str]:
    """The first case of each architecture, whole and divided sequences by turns."""
    with Scope("shared") as group:
        axis = Axis(group)
        for at, name in enumerate(sorted(CASES)):
            plan = TensorPlan(
                parallel_output=at % 2 == 0, vocabulary_multiple=4, sequence=(None, "split_gather")[at // 2 % 2]
            )
            assert compare(CASES[name]()[0], axis, plan)
    return sorted(CASES)


def test_the_first_head_of_every_architecture_cut_is_the_whole_one() -> None:
    assert run_ranks(2, first_ones, timeout=300.0) == [sorted(CASES)] * 2


def by_turns() -> list[object]:
    """Each architecture over two or four ranks; over the other number in the campaign."""
    rows: list[object] = []
    for at, name in enumerate(sorted(CASES)):
        for ranks in (2, 4):
            rows += (full if (ranks == 4) == (at % 2 == 1) else campaign)((name, ranks))
    return rows


@pytest.mark.parametrize(("architecture", "ranks"), by_turns())
def test_an_architecture_cut_is_the_whole_one(architecture: str, ranks: int) -> None:
    assert min(run_ranks(ranks, compared, architecture, timeout=300.0)) > 0
