"""Numbers of 8 bits: the stated bound, what is rounded stays so, and what is not finite, huge, tiny or absent.

What thousands of ranks that differ come to, against plain sums, and in how many messages of what size.

The mean of two ranks' 16-bit values, which takes another way than sums of more: the same bits.

What a rank does in a step grows with the logarithm of the number of ranks at most: counted, not timed.
"""

import gc
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.core.comm import BLOCK, GRADIENTS, INT4, INT8, VALUES, BlockFormat, Group, LocalGroup, summing
from shardwise.core.comm.control import Operation
from shardwise.core.comm.summing import RankSum
from shardwise.core.grads.norm import each_norm
from shardwise.plan import Plan, zero
from tests.support.alike import Transport, alike_mesh
from tests.support.alike_setup import PLANS, made, train
from tests.support.sets import full

FORMATS = {"e4m3": (VALUES, 2.0**-4, 2.0**-17), "e5m2": (GRADIENTS, 2.0**-3, 2.0**-31)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAGNITUDES = (1.0, 1e-6, 1e4, 1e38, 1e-30, 2.0**-140, 0.0)


def rounded(row: Tensor, format_: BlockFormat) -> Tensor:
    row = row.clone()
    format_.round_(row)
    return row


def spread(numel: int, magnitude: float, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (torch.randn(numel) * torch.exp(3 * torch.randn(numel)) * magnitude).clamp(-most, most).to(dtype)


def most_of_block(x: Tensor) -> Tensor:
    """For each element the largest of its block, in fp64."""
    blocks = torch.nn.functional.pad(x.double().abs(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.amax(1).repeat_interleave(BLOCK)[: x.numel()]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_within_its_bound_and_done_once(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    format_, relative, absolute = FORMATS[name]
    worst = 0.0
    for numel in (1, 5, BLOCK, BLOCK + 1, 1000, 20000):
        for magnitude in MAGNITUDES:
            x = spread(numel, magnitude, dtype)
            y, most = rounded(x, format_), most_of_block(x)
            bound = torch.maximum(relative * x.double().abs(), absolute * most)
            bound += torch.where(most < 2.0**-110, 2.0**-136, 0.0)
            error = (y.double() - x.double()).abs()
            assert (error <= bound).all()
            worst = max(worst, (error / x.double().abs().clamp(min=1e-300)).max().item())
            assert torch.equal(rounded(y, format_).view(torch.uint8), y.view(torch.uint8))  # to the bit
            assert torch.equal(y.signbit(), x.signbit())
    assert worst > relative / 2  # it is not the identity


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_is_not_lost(name: str) -> None:
    format_ = FORMATS[name][0]
    for bad in (float("inf"), -float("inf"), float("nan")):
        x = torch.ones(3 * BLOCK + 2)
        x[BLOCK + 3] = bad
        x[-1] = bad
        first, second, third, last = rounded(x, format_).split(BLOCK)
        assert second.isnan().all() and last.isnan().all()
        assert torch.equal(first, x[:BLOCK]) and torch.equal(third, x[2 * BLOCK : 3 * BLOCK])


@pytest.mark.parametrize(("format_", "most"), [(INT8, 127), (INT4, 7)], ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_numbers_are_within_their_bound(format_: BlockFormat, most: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    worst = 0.0
    for numel in (1, 2, 5, BLOCK, BLOCK + 1, 1000, 20001):
        for magnitude in MAGNITUDES:
            x = spread(numel, magnitude, dtype)
            y, bound = rounded(x, format_), most_of_block(x) / most
            error = (y.double() - x.double()).abs()
            assert (error <= bound + 2.0**-127).all()
            worst = max(worst, (error / bound.clamp(min=1e-300)).max().item() if magnitude == 1.0 else 0.0)
            assert torch.equal(rounded(y, format_), y)
            codes = format_.write(x.view(1, -1))
            assert codes.numel() == format_.row_bytes(numel) == -(-numel * format_.bits // 8) + -(-numel // BLOCK)
    assert 0.5 < worst <= 1.0  # it is no closer than is said


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
    found, lengths = met(
        size, lambda group, rank: group.totals(every[rank], "a test", compared=[7.0, float(rank == 5)])
    )
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


def any_bits(most: int) -> Tensor:
    return torch.randint(-most, most, (NUMEL,), dtype=torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("into", ["new memory", "the first", "the second"])
def test_it_is_the_sum_in_fp32_rounded_once(dtype: torch.dtype, into: str) -> None:
    for near in (True, False) * 2:
        bits = any_bits(2**15)  # every kind of number: subnormal ones, zeros, infinite ones and NaN
        # Sums of numbers of similar size are rounded.
        one, other = bits.view(dtype), (bits + any_bits(4000) if near else any_bits(2**15)).view(dtype)
        wanted = ((one.float() + other.float()) * 0.5).to(dtype)
        usual = (one.float().abs() < 1e38) & (other.float().abs() < 1e38)
        assert int(usual.sum()) > NUMEL // 2
        out = {"new memory": torch.empty_like(one), "the first": one, "the second": other}[into]
        with mock.patch.object(summing, "_mean_of_two", wraps=summing._mean_of_two) as taken:
            RankSum()(out, [one, other], 0.5)
        assert taken.call_count == 1
        assert torch.equal(out[usual], wanted[usual])
        infinite = ~usual & ~torch.isfinite(wanted.float())
        below = torch.finfo(dtype).max < 1e38
        assert not below or not torch.isfinite(out[infinite].float()).any()


def test_all_else_is_added_up_tile_by_tile() -> None:
    half = torch.bfloat16
    for dtype, count, scale in ((half, 3, 1 / 3), (half, 2, 1.0), (half, 2, 0.25), (torch.float32, 2, 0.5)):
        sources = [torch.randn(5000).to(dtype) for _ in range(count)]
        out, total = torch.empty_like(sources[0]), sum(source.float() for source in sources)
        with mock.patch.object(torch, "lerp", side_effect=AssertionError("not here")):
            RankSum()(out, sources, scale)
        assert torch.equal(out, (total * scale).to(dtype))


FEW, SOME, MANY = 128, 1024, 8192
BLOCKS = 4


def work(step: Callable[[], None]) -> Counter[str]:
    """Python's instructions in ``step``, by function: a loop over ranks shows whatever it does."""
    count = Counter[str]()

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            code = frame.f_code
            count[f"{code.co_filename} {getattr(code, 'co_qualname', code.co_name)}"] += 1
        return trace

    before = sys.gettrace()
    gc.disable()  # what others do when garbage is collected is no part of a step
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def counted(plan: Plan, ranks: int, transport: Transport) -> tuple[Counter[str], dict[str, int]]:
    """Of one step in the middle of training: instructions by function, and what is asked of the transport."""
    with alike_mesh(plan, ranks // 2, ranks, transport) as (mesh, asked):
        session = made(plan, mesh, BLOCKS)
        train(session, 3)
        session.reset_traffic()
        asked.reset()
        instructions = work(lambda: train(session, 1))
        sent, got = session.traffic(), asked.received_bytes
        found = {
            "operations": sum(asked.calls.values()),
            "bytes sent to agree": sent["exchange"],
            "bytes got to agree": got.get("all_gather", 0) - sent["all_gather"] + got.get("all_reduce", 0),
        }
        session.close()
    return instructions, found


def growing(few: Mapping[str, int], some: Mapping[str, int], many: Mapping[str, int]) -> list[str]:
    """What grows faster than a logarithm. Eight times the ranks add as much again, whatever the number, where it is
    one; a loop over ranks adds eight times as much as the last time."""
    found = []
    for what in many:
        first, second, third = (each.get(what, 0) for each in (few, some, many))
        if third - second > 1.5 * max(second - first, 0) + 0.1 * SOME:
            found.append(f"{what}: {first}, {second}, {third} at {FEW}, {SOME}, {MANY} ranks")
    return found


WAYS = [(1, "queued"), (3, "native"), *full((1, "native"), (2, "native"), (2, "queued"), (3, "queued"))]


@pytest.mark.parametrize(("stage", "transport"), WAYS)
def test_a_step_grows_with_the_logarithm(stage: Any, transport: Transport) -> None:
    few, some, many = (counted(zero(stage), ranks, transport) for ranks in (FEW, SOME, MANY))
    assert growing(few[1], some[1], many[1]) == []
    assert growing(few[0], some[0], many[0]) == []


def test_a_loop_over_ranks_is_found() -> None:
    def work_of(ranks: int) -> Counter[str]:
        return work(lambda: [2 * rank for rank in range(ranks)] and None)

    assert len(growing(work_of(FEW), work_of(SOME), work_of(MANY))) == 1


def test_layout_has_no_table_of_ranks() -> None:
    with alike_mesh(PLANS["zero3"], 0, 16384) as (mesh, _):
        session = made(PLANS["zero3"], mesh, BLOCKS)
        for spec in session.engine.shards.layout.chunks:
            assert sys.getsizeof(spec.bounds) < 100 and spec.shard_offsets is None
            assert len(spec.bounds) == 16385 and spec.bounds[-1] == spec.padded_numel
        session.close()
