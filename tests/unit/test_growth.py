"""What a rank does in a step grows with the logarithm of the number of ranks at most: counted, not timed."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest

from shardwise.plan import Plan, zero
from shardwise.session import Session
from tests.support.alike import Transport, alike_mesh
from tests.support.alike_setup import PLANS, made, train
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
