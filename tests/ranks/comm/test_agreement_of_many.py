"""How thousands of ranks agree, tried with a few: the same answers as where each rank gets every rank's numbers."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwise.core.comm import Group, Summary
from shardwise.testing import run_ranks
from tests.support.scope import Scope
from tests.support.sets import full

FLAGS, MORE_FLAGS = 100, 2000


def numbers(rank: int) -> list[float]:
    return [float(rank), -2.0 * rank, 7.0, *(float((rank * step) % 5) for step in range(60))]


def flags(rank: int) -> list[bool]:
    return [(each + rank) % 7 == 0 for each in range(FLAGS)]


def told(kind: str, rows_up_to: int) -> dict[str, Any]:
    rank = dist.get_rank()
    with mock.patch.object(Group, "rows_up_to", rows_up_to), Scope(kind) as group:
        found: dict[str, Any] = {
            "unlike": group.summarize(numbers(rank), "a test", flags=flags(rank)),
            "alike": group.summarize([3.0, 2.0**53 - 1], "a test", flags=flags(0)),
            "one flag": group.summarize([1.0], "a test", flags=[rank == 1]),
            "one value": group.summarize([float(rank == 1)], "a test", flags=flags(0)),
            "more flags": group.summarize([1.0], "a test", flags=[(at + rank) % 9 == 0 for at in range(MORE_FLAGS)]),
            "nothing": group.summarize([], "a test"),
            "rows": group.exchange(numbers(rank), "a test"),
            "same rows": group.exchange([1.0, 2.5], "a test"),
            "no rows": group.exchange([], "a test"),
            "objects": group.exchange_object({"rank": rank}),
            "first's": group.broadcast_values(numbers(rank), "a test"),
            "first's, alike": group.broadcast_values(numbers(1), "a test"),
            "sums": group.totals([math.sqrt(each + 60.0) for each in numbers(rank)], "a test", beside=[1.0]),
            "largest": group.totals(numbers(rank), "a test", largest=True),
        }
        found["nan"] = [math.isnan(row[0]) for row in group.exchange([math.nan if rank else 1.0], "a test")]
        found["traffic"] = dict(group.traffic.bytes), dict(group.traffic.calls)
    return found


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        *[(2, "gloo"), (3, "native"), (5, "gloo")],
        *full((2, "native"), (3, "gloo"), (4, "gloo"), (4, "native"), (5, "native")),
    ],
)
def test_the_answers_are_the_same(ranks: int, kind: str) -> None:
    many, few = run_ranks(ranks, told, kind, 1), run_ranks(ranks, told, kind, 16)
    sums_of_few = few[0]["sums"]
    for one, other in zip(many, few, strict=True):
        traffic, _ = one.pop("traffic"), other.pop("traffic")
        assert one.pop("sums") == (pytest.approx(other.pop("sums")[0]), [True])
        assert one == other
        assert traffic[0]["exchange"] > 0
    every = [numbers(rank) for rank in range(ranks)]
    columns = list(zip(*every, strict=True))
    anywhere = [any(column) for column in zip(*(flags(rank) for rank in range(ranks)), strict=True)]
    least, most = [min(column) for column in columns], [max(column) for column in columns]
    assert many[0]["unlike"] == Summary(least, most, anywhere, False, False)
    assert many[0]["alike"] == Summary([3.0, 2.0**53 - 1], [3.0, 2.0**53 - 1], flags(0), True, True)
    assert many[0]["one flag"] == Summary([1.0], [1.0], [True], False, False)
    assert many[0]["one value"] == Summary([0.0], [1.0], flags(0), False, True)
    assert many[0]["rows"] == every
    assert many[0]["first's"] == every[0] and many[0]["first's, alike"] == numbers(1)
    sums = [math.fsum(math.sqrt(each + 60.0) for each in column) for column in columns]
    assert sums_of_few == (sums, [True]) and many[0]["largest"] == (most, [])
    assert many[0]["objects"] == [{"rank": rank} for rank in range(ranks)]
    assert many[0]["nan"] == [False, *[True] * (ranks - 1)]
