"""What a rank does in a step grows with the logarithm of the number of ranks at most: counted, not timed."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from shardwise.core.comm import NativeGroup
from shardwise.core.comm.control import Operation
from shardwise.core.engine.optimizer import first_non_finite
from shardwise.core.grads import norm
from shardwise.core.shards.layout import make_layout
from shardwise.plan import Plan, zero
from shardwise.session import Session
from tests.support.alike import Transport, alike_mesh
from tests.support.alike_setup import PLANS, WIDTH, made, train
from tests.support.sets import full

FEW, SOME, MANY = 128, 1024, 8192
BLOCKS = 4
STEADY: dict[str, Plan] = {"zero1": zero(1), "zero2": zero(2), "zero3": zero(3)}


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


Step = Callable[[Session], None]


def counted(
    plan: Plan, ranks: int, transport: Transport = "native", step: Step = lambda session: train(session, 1)
) -> tuple[Counter[str], dict[str, int]]:
    """Of one step in the middle of training: instructions by function, and what is asked of the transport."""
    with alike_mesh(plan, ranks // 2, ranks, transport) as (mesh, asked):
        session = made(plan, mesh, BLOCKS)
        for _ in range(3):
            step(session)
        session.reset_traffic()
        asked.reset()
        instructions = work(lambda: step(session))
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


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("zero1", "queued"),
        ("zero3", "native"),
        *full(("zero1", "native"), ("zero2", "native"), ("zero2", "queued"), ("zero3", "queued")),
    ],
)
def test_a_step_grows_with_the_logarithm(name: str, transport: Transport) -> None:
    few, some, many = (counted(STEADY[name], ranks, transport) for ranks in (FEW, SOME, MANY))
    assert growing(few[1], some[1], many[1]) == []
    assert growing(few[0], some[0], many[0]) == []


Lengths = list[int]


@contextlib.contextmanager
def unlike(purpose: str) -> Iterator[Lengths]:
    """Inside, of what is told for ``purpose`` peers have more than this rank, as they have in a run: alike ones would
    show nothing of what that costs. Gives how many numbers each message had."""
    reduced, lengths = NativeGroup._all_reduced, Lengths()

    def more(group: NativeGroup, values: list[float], operation: Operation, about: str) -> list[float]:
        found = reduced(group, values, operation, about)
        if about == purpose:
            head, half = (2 if not lengths else 0), len(values) // 2  # what they have come for is the same
            if operation == "max":
                found[head:half] = [each + 1.0 for each in found[head:half]]
            lengths.append(len(values))
        return found

    with mock.patch.object(NativeGroup, "_all_reduced", more):
        yield lengths


def clipped(session: Session) -> None:
    """A step as programs for plain torch have it, of ranks whose shares of each parameter's norm differ."""
    shares = lambda parts, p, wide: [0.1 + at for at in range(len(parts))]  # noqa: E731
    with unlike(norm.NORMS) as lengths, mock.patch.object(norm, "_shares", shares):
        session.backward(session.module(torch.full((2, WIDTH), 0.1)).square().mean())
        assert math.isfinite(clip_grad_norm_(session.module.parameters(), 0.01))
        session.optimizer.step()
        session.optimizer.zero_grad()
    assert lengths == [512, 4 * BLOCKS + 2]


@pytest.mark.parametrize("name", ["zero2", *full("zero1", "zero3")])
def test_a_step_that_clips_by_torch_grows_with_the_logarithm(name: str) -> None:
    few, some, many = (counted(STEADY[name], ranks, step=clipped) for ranks in (FEW, SOME, MANY))
    assert growing(few[1], some[1], many[1]) == []
    assert growing(few[0], some[0], many[0]) == []


def test_a_new_set_in_use_grows_with_the_logarithm() -> None:
    """Ranks' orders differ, so that rank 0's is told."""
    reduced = NativeGroup._all_reduced

    def unlike_orders(group: NativeGroup, values: list[float], operation: Operation, about: str) -> list[float]:
        found = reduced(group, values, operation, about)
        if about == "the order of reduction":
            first = [*found[:2], found[2] + 1.0, *found[3:]]
            found = first if len(values) == 512 else list(map(float, range(len(values))))
        return found

    def counts(ranks: int) -> tuple[Counter[str], dict[str, int]]:
        with (
            alike_mesh(STEADY["zero3"], 1, ranks) as (mesh, asked),
            mock.patch.object(NativeGroup, "_all_reduced", unlike_orders),
        ):
            session = made(STEADY["zero3"], mesh, BLOCKS)
            train(session, 1)
            reducer = session.engine.grads.passes._reducer
            assert reducer._order == reducer.states
            reducer._orders.clear()
            asked.reset()
            instructions = work(lambda: reducer._reorder([True] * len(reducer.states)))
            found = dict(asked.calls)
            session.close()
        return instructions, found

    few, some, many = (counts(ranks) for ranks in (FEW, SOME, MANY))
    assert [each[1]["all_reduce"] for each in (few, some, many)] == [2] * 3
    assert growing(few[0], some[0], many[0]) == []


def test_a_skipped_step_grows_with_the_logarithm() -> None:
    """Ranks name different parameters."""

    def counts(ranks: int) -> tuple[Counter[str], dict[str, int]]:
        with alike_mesh(STEADY["zero2"], 0, ranks) as (mesh, asked), unlike("which gradient is not finite"):
            session = made(STEADY["zero2"], mesh, BLOCKS)
            session.backward(session.module(torch.full((2, WIDTH), math.inf)).square().mean())
            engine, names = session.engine, list[str]()
            asked.reset()
            given = engine.grads.states.values(), engine.shards.layout.facts, engine.shards.mesh
            instructions = work(lambda given=given: names.append(first_non_finite(*given)))
            assert names == ["blocks.0.up.weight"]
            found = dict(asked.calls)
            session.close()
        return instructions, found

    few, some, many = (counts(ranks) for ranks in (FEW, SOME, MANY))
    assert [each[1]["all_reduce"] for each in (few, some, many)] == [1] * 3
    assert growing(few[0], some[0], many[0]) == []


def test_the_end_of_a_pass_takes_one_message() -> None:
    """Which parameters had gradients."""
    for ranks in (FEW, SOME, MANY):
        with alike_mesh(STEADY["zero1"], 1, ranks) as (mesh, asked):
            session = made(STEADY["zero1"], mesh, BLOCKS)
            train(session, 2)
            asked.reset()
            session.backward(session.module(torch.full((2, WIDTH), 0.1)).square().mean())
            assert asked.calls["all_reduce"] == 1
            session.close()


def test_a_few_ranks_ask_for_no_more_than_that() -> None:
    """8 ranks get each other's numbers in one operation; thousands the least and the most."""
    (_, few), (_, many) = counted(STEADY["zero1"], 8), counted(STEADY["zero1"], MANY)
    assert many["bytes got to agree"] <= 7 * few["bytes got to agree"], (few, many)
    assert many["operations"] <= few["operations"] + 2, (few, many)


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


def test_building_meets_no_table_of_ranks_in_python() -> None:
    """Layouts of 8 and of 16384 ranks take the same instructions."""
    counts = []
    for ranks in (8, 16384):
        with alike_mesh(STEADY["zero2"], 0, ranks) as (mesh, _):
            session = made(STEADY["zero2"], mesh, BLOCKS)
            facts, model, packing = session.engine.shards.layout.facts, session.model, STEADY["zero2"].shard.packing
            counts.append(work(lambda f=facts, m=model, p=packing, r=ranks: make_layout(f, m, p, r, 1)))
            session.close()
    assert counts[0] == counts[1]
