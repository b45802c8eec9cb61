"""How thousands of ranks agree, tried with a few: the same answers as where each rank gets every rank's numbers."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from alike_setup import PLANS, WIDTH, Blocks, made, real_native
from scope import Scope
from torch import Tensor

from shardwise.comm import Group, PeerError, Summary, register_backend
from shardwise.comm.exact import WORDS, rounded, words_of
from shardwise.mesh import Mesh
from shardwise.testing import run_ranks

FLAGS = 100


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
            "nothing": group.summarize([], "a test"),
            "rows": group.exchange(numbers(rank), "a test"),
            "same rows": group.exchange([1.0, 2.5], "a test"),
            "no rows": group.exchange([], "a test"),
            "objects": group.exchange_object({"rank": rank}),
        }
        found["nan"] = [math.isnan(row[0]) for row in group.exchange([math.nan if rank else 1.0], "a test")]
        found["traffic"] = dict(group.traffic.bytes), dict(group.traffic.calls)
    return found


@pytest.mark.parametrize(
    ("ranks", "kind"), [*itertools.product([2, 3, 4, 5], ["gloo", "native"]), (3, "hosts"), (5, "hosts")]
)
def test_the_answers_are_the_same(ranks: int, kind: str) -> None:
    many, few = run_ranks(ranks, told, kind, 1), run_ranks(ranks, told, kind, 16)
    for one, other in zip(many, few, strict=True):
        traffic, _ = one.pop("traffic"), other.pop("traffic")
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
    assert many[0]["objects"] == [{"rank": rank} for rank in range(ranks)]
    assert many[0]["nan"] == [False, *[True] * (ranks - 1)]


def shares(seed: int, ranks: int) -> list[float]:
    """One a rank: of all sizes, so that sums in another order differ, or all alike, or small."""
    chooser = random.Random(seed)
    if seed % 5 == 4:
        return [chooser.random()] * ranks
    scale = [1.0, 1e-310, 1e300, 1e16][seed % 5]
    return [chooser.random() * scale * 10.0 ** chooser.randint(-12, 0) for _ in range(ranks)]


SPECIAL = [
    [math.nan, 1.0, math.inf],
    [1.0, math.inf, 2.0],
    [1.7e308, 1.7e308, 1.7e308],
    [0.0, 0.0, 5e-324],
    [0.0, 0.0, 0.0],
    [-1.5, 1e-30, 1.5],
]


def totals(kind: str, rows_up_to: int) -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    with mock.patch.object(Group, "rows_up_to", rows_up_to), Scope(kind) as group:
        for seed in range(40):
            own = shares(seed, ranks)[rank]
            beside = [1.0, float(rank == 1 and seed % 2)]
            found.append(group.total(own, "a test", beside=beside))
            found.append(group.total(own, "a test", largest=True))
        for special in SPECIAL:
            found += [str(group.total(special[rank % 3], "a test", largest=large)[0]) for large in (False, True)]
        before = group.traffic.bytes["exchange"]
        group.total(float(rank), "a test")
        found.append(group.traffic.bytes["exchange"] - before)
    return found


@pytest.mark.parametrize("kind", ["gloo", "native", "hosts"])
@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_sum_is_exact_whatever_the_number_of_ranks(ranks: int, kind: str) -> None:
    many, few = run_ranks(ranks, totals, kind, 1), run_ranks(ranks, totals, kind, 16)
    assert all(rows[:-1] == few[0][:-1] for rows in (*many, *few))
    for seed in range(40):
        own = shares(seed, ranks)
        assert many[0][2 * seed] == (math.fsum(own), [True, seed % 2 == 0])
        assert many[0][2 * seed + 1] == (max(own), [])
    texts = many[0][80:-1]
    assert texts[:6] == ["nan", "nan", "inf", "inf", "inf", "1.7e+308"] and texts[8:10] == ["0.0", "0.0"]
    # Least and most of 32 numbers, then 66 words, as many times as there are digits, and ones beside the first.
    digits, ones = (ranks - 1).bit_length(), ranks.bit_count() - 1
    assert {rows[-1] for rows in many} == {8 * (2 * 32 * digits + 66 * (ranks.bit_length() - 1 + ones))}


def test_words_are_the_number_and_nothing_else() -> None:
    chooser = random.Random(3)
    for _ in range(300):
        values = [chooser.uniform(-1, 1) * 2.0 ** chooser.randint(-1074, 1000) for _ in range(9)]
        words = [sum(column) for column in zip(*map(words_of, values), strict=True)]
        assert rounded(words) == math.fsum(values) and len(words) == WORDS
        assert all(rounded(words_of(value)) == value for value in values)
    assert rounded([2**33] * WORDS) == math.inf


def astray(kind: str) -> tuple[str, str]:
    rank = dist.get_rank()
    texts = []
    with mock.patch.object(Group, "rows_up_to", 1), Scope(kind) as group:
        for meet in (
            lambda: group.summarize([1.0], "one thing") if rank else group.exchange([2.0], "another thing"),
            lambda: group.exchange([1.0] * (40 + rank), "a number of numbers"),
        ):
            try:
                meet()
                texts.append("they met")
            except PeerError as error:
                texts.append(str(error))
        assert group.exchange([0.0], "afterwards") == [[0.0]] * group.size
    return texts[0], texts[1]


@pytest.mark.parametrize("kind", ["gloo", "native", "hosts"])
def test_ranks_that_came_for_different_things_are_told(kind: str) -> None:
    for purposes, lengths in run_ranks(3, astray, kind):
        assert "rank 0: another thing (1 values); ranks [1, 2]: one thing (1 values)" in purposes
        assert "rank 0: a number of numbers (40 values); rank 1: a number of numbers (41 values)" in lengths


def branching(name: str, rows_up_to: int) -> dict[str, Tensor]:
    """Ranks that use different blocks, so that what they tell each other differs."""
    put_back = register_backend("cpu", real_native)
    with mock.patch.object(Group, "rows_up_to", rows_up_to):
        try:
            mesh = Mesh.create(PLANS[name].mesh, torch.device("cpu"), PLANS[name].comm)
        finally:
            put_back()
        session = made(PLANS[name], mesh, 3)
        model = session.model
        assert isinstance(model, Blocks)
        for step in range(3):
            used = model.blocks[(dist.get_rank() + step) % 3]
            with mock.patch.object(model, "forward", lambda x, used=used: model.head(used(x))):
                session.backward(session.module(torch.full((2, WIDTH), 0.3)).square().mean())
            session.optimizer.step()
            session.optimizer.zero_grad()
        state = {key: value.clone() for key, value in session.module.state_dict().items()}
        session.close()
        mesh.close()
    return state


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_training_comes_to_the_same_bits(name: str) -> None:
    many, few = run_ranks(3, branching, name, 1)[0], run_ranks(3, branching, name, 16)[0]
    assert many.keys() == few.keys()
    assert all(torch.equal(many[key], few[key]) for key in few)
