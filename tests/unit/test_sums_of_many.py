"""What thousands of ranks that differ come to, against plain sums, and in how many messages of what size.

The mean of two ranks' 16-bit values, which takes another way than sums of more: the same bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.core.comm import Group, LocalGroup, summing
from shardwise.core.comm.control import Operation
from shardwise.core.comm.summing import RankSum
from shardwise.core.grads.norm import each_norm
from tests.support.sets import full

T = TypeVar("T")


@dataclass
class Said(Exception):
    """What a rank says, when nobody has answered yet."""

    values: list[float]
    operation: Operation


class Player(LocalGroup):
    """One rank of many, whose messages are answered in turn."""

    def __init__(self, rank: int, size: int, answers: Sequence[Any]) -> None:
        super().__init__("many", torch.device("cpu"))
        self.rank, self.size, self._answers = rank, size, iter(answers)

    def _all_reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        for answer in self._answers:
            return list(answer)
        raise Said(values, operation)


def of_all(said: Sequence[Said]) -> list[float]:
    """What an all-reduce makes of what each says."""
    every = torch.tensor([each.values for each in said], dtype=torch.float64)
    if said[0].operation == "sum":
        return every.sum(0).tolist()
    assert not every.isnan().any(), "of NaN and another number the most is either"
    return every.amax(0).tolist()


def met(size: int, call: Callable[[Group, int], T]) -> tuple[list[T], list[int]]:
    """What each of ``size`` ranks gets of ``call(group, rank)``, and how many numbers each of their messages had."""
    answers, lengths = list[Any](), list[int]()
    while True:
        found, said = list[T](), list[Said]()
        for rank in range(size):
            try:
                found.append(call(Player(rank, size, answers), rank))
            except Said as each:
                said.append(each)
        if not said:
            return found, lengths
        kinds = {(len(each.values), each.operation) for each in said}
        assert len(said) == size and len(kinds) == 1, "ranks are at different messages"
        lengths.append(len(said[0].values))
        answers.append(of_all(said))


def plain_sum(values: Sequence[float]) -> float:
    try:
        return float(sum(map(Fraction, values)))
    except OverflowError:
        return math.inf


def shares(size: int, norms: int) -> list[list[float]]:
    """By rank, of each of some parameters: norms in fp32 to the power of 2, as of a model; and unlike and alike ones of
    all sizes."""
    chooser = random.Random(size)

    def square(scale: float) -> float:
        return float(torch.tensor(chooser.random() * scale)) ** 2  # rounded to fp32

    return [
        [
            *(square(10.0 ** (at % 7 - 4)) for at in range(norms)),
            0.25,
            0.0,
            float(rank == 3),
            chooser.uniform(-1, 1) * 10.0 ** chooser.randint(-300, 300),
            chooser.random() * 5e-320,
            -1.5 if rank % 2 else 1.5,
            1.7e308 if rank < 2 else 0.0,
        ]
        for rank in range(size)
    ]


@pytest.mark.parametrize(("size", "norms"), [(65, 40), *full((512, 300), (4096, 4))])
def test_sums_of_many_values(size: int, norms: int) -> None:
    every = shares(size, norms)
    found, lengths = met(size, lambda group, rank: group.totals(every[rank], "a test", beside=[7.0, float(rank == 5)]))
    expected = [plain_sum(column) for column in zip(*every, strict=True)]
    for sums, same in found:
        assert sums == found[0][0] and same == [True, False]
        assert sums == pytest.approx(expected, rel=1e-12)
    # Least and most of all numbers, and the sums.
    count = 2 + norms + 7 + 2
    assert lengths == [512, *([512] if count > 256 else []), norms + 7]


def test_what_is_not_finite_is_so_alone() -> None:
    """Of several sums one is NaN, one infinite; the others are what they are."""
    rows = [[math.nan, math.inf, 1.0, 2.0], [1.0, 2.0, 3.0, 2.0], [math.inf, 0.0, 0.1, 2.0]]
    every = [rows[rank % 3] for rank in range(66)]
    for largest in (False, True):
        found, _ = met(66, lambda group, rank, large=largest: group.totals(every[rank], "a test", largest=large)[0])
        expected = [math.nan, math.inf, 3.0 if largest else 22 * 4.1, 2.0 if largest else 132.0]
        assert all(each == pytest.approx(expected, nan_ok=True) for each in found)


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
def test_the_norms_of_parameters_are_those_of_the_whole(p: float) -> None:
    """128 ranks with a part of each; one of them overflows in fp32, and nobody has one."""
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(256, generator=generator) * 10.0**-at for at in range(5)] + [torch.full((256,), 1e30)]
    parts = [[each.view(128, -1)[rank] for each in whole] + [None] for rank in range(128)]
    found, lengths = met(128, lambda group, rank: each_norm(parts[rank], p, group, None, [False] * 7))
    expected = [float(torch.linalg.vector_norm(each.double(), p)) for each in whole]
    assert all(each == found[0] for each in found)
    assert found[0] == pytest.approx([*expected, 0.0], rel=1e-6)
    # Where powers overflow in fp32 the ranks meet again.
    assert len(lengths) == {2.0: 4, 1.0: 2, math.inf: 1}[p]


@pytest.mark.parametrize("size", [65, *full(512, 4096)])
def test_the_first_rank_s_values(size: int) -> None:
    some = [[float((rank * at) % 41) for at in range(50)] for rank in range(41)]
    own = [[float(at) for at in range(50)], *(some[rank % 41] for rank in range(1, size))]
    found, lengths = met(size, lambda group, rank: group.broadcast_values(own[rank], "a test"))
    assert all(each == own[0] for each in found) and lengths == [512, 50]
    found, lengths = met(size, lambda group, rank: group.broadcast_values(own[0], "a test"))
    assert all(each == own[0] for each in found) and lengths == [512]


NUMEL = 1 << 18


def any_values(dtype: torch.dtype, seed: int) -> Tensor:
    """Every kind of number: subnormal ones, zeros, infinite ones and NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (NUMEL,), dtype=torch.int16, generator=generator).view(dtype)


def near(values: Tensor, seed: int) -> Tensor:
    """Numbers of similar size, where sums are rounded."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-4000, 4000, (NUMEL,), dtype=torch.int16, generator=generator)
    return (values.view(torch.int16) + bits).view(values.dtype)


def one_pass() -> mock._patch[mock.Mock]:
    return mock.patch.object(summing, "_mean_of_two", wraps=summing._mean_of_two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("into", ["new memory", "the first", "the second"])
def test_it_is_the_sum_in_fp32_rounded_once(dtype: torch.dtype, into: str) -> None:
    for seed in range(4):
        one = any_values(dtype, seed)
        other = near(one, seed + 50) if seed % 2 else any_values(dtype, seed + 100)
        wanted = ((one.float() + other.float()) * 0.5).to(dtype)
        usual = (one.float().abs() < 1e38) & (other.float().abs() < 1e38)
        assert int(usual.sum()) > NUMEL // 2
        out = {"new memory": torch.empty_like(one), "the first": one, "the second": other}[into]
        with one_pass() as taken:
            RankSum()(out, [one, other], 0.5)
        assert taken.call_count == 1
        assert torch.equal(out[usual], wanted[usual])
        infinite = ~usual & ~torch.isfinite(wanted.float())
        below = torch.finfo(dtype).max < 1e38
        assert not below or not torch.isfinite(out[infinite].float()).any()


@pytest.mark.parametrize(
    ("dtype", "count", "scale"),
    [(torch.bfloat16, 3, 1 / 3), (torch.bfloat16, 2, 1.0), (torch.bfloat16, 2, 0.25), (torch.float32, 2, 0.5)],
)
def test_all_else_is_added_up_tile_by_tile(dtype: torch.dtype, count: int, scale: float) -> None:
    sources = [torch.randn(5000).to(dtype) for _ in range(count)]
    out = torch.empty_like(sources[0])
    total = torch.zeros(5000)
    for source in sources:
        total = total + source.float()
    with mock.patch.object(torch, "lerp", side_effect=AssertionError("not here")):
        RankSum()(out, sources, scale)
    assert torch.equal(out, (total * scale).to(dtype))
