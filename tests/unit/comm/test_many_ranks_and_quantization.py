"""Tests of quantized values, of sums over thousands of simulated ranks, and of the cost of a step by number of ranks.

- ``BlockFormat``: rounding errors are within their bounds, and NaN and infinity are kept.
- ``totals``, ``each_norm`` and ``broadcast_values`` over many ranks equal plain sums, with few messages.
- ``RankSum`` of two 16-bit tensors has the same bits as a sum in fp32 that is rounded once.
- Instructions, operations and bytes of a step grow at most with the logarithm of the number of ranks. They are counted,
  not timed.
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
    """Return for each element the largest absolute value of its block, in fp64."""
    blocks = torch.nn.functional.pad(x.double().abs(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.amax(1).repeat_interleave(BLOCK)[: x.numel()]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_within_its_bound_and_idempotent(name: str, dtype: torch.dtype) -> None:
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
            assert torch.equal(rounded(y, format_).view(torch.uint8), y.view(torch.uint8))  # bit for bit
            assert torch.equal(y.signbit(), x.signbit())
    assert worst > relative / 2  # the test would notice a format that rounds nothing


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_keeps_nan_and_infinity(name: str) -> None:
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
def test_int_formats_are_within_their_bound(format_: BlockFormat, most: int, dtype: torch.dtype) -> None:
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
    assert 0.5 < worst <= 1.0  # the bound is nearly reached


T = TypeVar("T")


@dataclass
class Said(Exception):
    """Raised when a rank sends values and there is no answer yet."""

    values: list[float]
    operation: Operation


class Player(LocalGroup):
    """One of many ranks, with a list of answers to its messages."""

    def __init__(self, rank: int, size: int, answers: Sequence[Any]) -> None:
        super().__init__("many", torch.device("cpu"))
        self.rank, self.size, self._answers = rank, size, iter(answers)

    def _all_reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        for answer in self._answers:
            return list(answer)
        raise Said(values, operation)


def of_all(said: Sequence[Said]) -> list[float]:
    """Return the result of the all-reduce."""
    every = torch.tensor([each.values for each in said], dtype=torch.float64)
    if said[0].operation == "sum":
        return every.sum(0).tolist()
    assert not every.isnan().any(), "of NaN and another number the most is either"
    return every.amax(0).tolist()


def met(size: int, call: Callable[[Group, int], T]) -> tuple[list[T], list[int]]:
    """Return what ``call(group, rank)`` returns on each of ``size`` ranks, and the lengths of the messages."""
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
    """Return for each rank squared fp32 norms of parameters as in a model, and values of very different sizes."""
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
    # First the least and most of all numbers, then the sums.
    count = 2 + norms + 7 + 2
    assert lengths == [512, *([512] if count > 256 else []), norms + 7]


def test_nan_and_infinity_do_not_affect_other_sums() -> None:
    """One of the sums is NaN and one is infinite; the others are not affected."""
    rows = [[math.nan, math.inf, 1.0, 2.0], [1.0, 2.0, 3.0, 2.0], [math.inf, 0.0, 0.1, 2.0]]
    every = [rows[rank % 3] for rank in range(66)]
    for largest in (False, True):
        found, _ = met(66, lambda group, rank, large=largest: group.totals(every[rank], "a test", largest=large)[0])
        expected = [math.nan, math.inf, 3.0 if largest else 22 * 4.1, 2.0 if largest else 132.0]
        assert all(each == pytest.approx(expected, nan_ok=True) for each in found)


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
def test_norms_of_sharded_parameters(p: float) -> None:
    """Each of 128 ranks has a shard. One norm overflows in fp32, and no rank has the last parameter."""
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(256, generator=generator) * 10.0**-at for at in range(5)] + [torch.full((256,), 1e30)]
    parts = [[each.view(128, -1)[rank] for each in whole] + [None] for rank in range(128)]
    found, lengths = met(128, lambda group, rank: each_norm(parts[rank], p, group, None, [False] * 7))
    expected = [float(torch.linalg.vector_norm(each.double(), p)) for each in whole]
    assert all(each == found[0] for each in found)
    assert found[0] == pytest.approx([*expected, 0.0], rel=1e-6)
    # Powers that overflow in fp32 need a second exchange.
    assert len(lengths) == {2.0: 4, 1.0: 2, math.inf: 1}[p]


@pytest.mark.parametrize("size", [65, *full(512, 4096)])
def test_broadcast_values(size: int) -> None:
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
def test_mean_of_two_is_the_rounded_fp32_mean(dtype: torch.dtype, into: str) -> None:
    for near in (True, False) * 2:
        bits = any_bits(2**15)  # subnormal numbers, zeros, infinities and NaN included
        # Sums of numbers of similar size have to be rounded.
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


def test_other_sums_are_added_in_tiles() -> None:
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
    """Count Python's instructions in ``step`` by function, which shows any loop over ranks."""
    count = Counter[str]()

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            code = frame.f_code
            count[f"{code.co_filename} {getattr(code, 'co_qualname', code.co_name)}"] += 1
        return trace

    before = sys.gettrace()
    gc.disable()  # garbage collection is not part of a step
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def counted(plan: Plan, ranks: int, transport: Transport) -> tuple[Counter[str], dict[str, int]]:
    """Return instructions by function and the use of the transport, of one step in the middle of training."""
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
    """Return what grows faster than a logarithm.

    A logarithm grows by the same amount for each factor of eight in ranks; a loop over ranks grows by eight times the
    previous amount.
    """
    found = []
    for what in many:
        first, second, third = (each.get(what, 0) for each in (few, some, many))
        if third - second > 1.5 * max(second - first, 0) + 0.1 * SOME:
            found.append(f"{what}: {first}, {second}, {third} at {FEW}, {SOME}, {MANY} ranks")
    return found


WAYS = [(1, "queued"), (3, "native"), *full((1, "native"), (2, "native"), (2, "queued"), (3, "queued"))]


@pytest.mark.parametrize(("stage", "transport"), WAYS)
def test_cost_of_a_step_grows_with_the_logarithm(stage: Any, transport: Transport) -> None:
    few, some, many = (counted(zero(stage), ranks, transport) for ranks in (FEW, SOME, MANY))
    assert growing(few[1], some[1], many[1]) == []
    assert growing(few[0], some[0], many[0]) == []


def test_loops_over_ranks_are_detected() -> None:
    def work_of(ranks: int) -> Counter[str]:
        return work(lambda: [2 * rank for rank in range(ranks)] and None)

    assert len(growing(work_of(FEW), work_of(SOME), work_of(MANY))) == 1


def test_layout_has_no_table_of_ranks() -> None:
    with alike_mesh(PLANS["zero3"], 0, 16384) as (mesh, _):
        session = made(PLANS["zero3"], mesh, BLOCKS)
        for spec in session._engine.shards.layout.chunks:
            assert sys.getsizeof(spec.bounds) < 100 and spec.shard_offsets is None
            assert len(spec.bounds) == 16385 and spec.bounds[-1] == spec.padded_numel
        session.close()
