"""Models of every architecture, with every head, cut over two and four ranks against the same models whole, in fp64,
with whole sequences and with divided ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from scope import Scope
from tensor_cases import CASES
from tensor_setup import compare

from shardwise.plan import TensorPlan
from shardwise.tensor import Axis
from shardwise.testing import run_ranks

MODES: tuple[Literal["split_gather", "ring"], ...] = ("split_gather", "ring")


def compared(architecture: str) -> int:
    """All cases of an architecture, logits cut and gathered by turns, sequences divided in each way, then by turns."""
    cases = CASES[architecture]()
    scope = Scope("shared")
    with scope as group:
        axis = Axis(group)
        axis.wire = scope.wire()
        for at, case in enumerate(cases):
            plan = TensorPlan(parallel_output=at % 2 == axis.size // 4 % 2, vocabulary_multiple=(4, 64)[at % 2])
            modes = MODES if at == 0 else (MODES[(at // 2 + axis.size // 4) % 2],) * (at % 2)
            shapes = compare(case, axis, plan, *(replace(plan, sequence=mode) for mode in modes))
            assert shapes
    return len(cases)


def by_turns() -> list[object]:
    """Each architecture over two or four ranks; over the other number in the campaign."""
    turns = enumerate(sorted(CASES))
    rows = [(name, ranks, (ranks == 4) == (at % 2 == 1)) for at, name in turns for ranks in (2, 4)]
    return [pytest.param(name, ranks, marks=() if now else pytest.mark.campaign) for name, ranks, now in rows]


@pytest.mark.parametrize(("architecture", "ranks"), by_turns())
def test_an_architecture_cut_is_the_whole_one(architecture: str, ranks: int) -> None:
    assert min(run_ranks(ranks, compared, architecture, timeout=300.0)) > 0
