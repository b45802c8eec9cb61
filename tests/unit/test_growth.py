"""What a rank does in a step grows with the logarithm of the number of ranks at most: counted, not timed."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest
from alike_setup import PLANS, made, train

from shardwise.chunk.layout import make_layout
from shardwise.comm.exact import WORDS, words_of
from shardwise.plan import Plan, zero
from shardwise.testing import alike_mesh
from shardwise.testing.alike import Transport

FEW, SOME, MANY = 64, 512, 4096
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


def counted(plan: Plan, ranks: int, transport: Transport = "native") -> tuple[Counter[str], dict[str, int]]:
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
            "bytes got to agree": got.get("all_gather", 0) - sent["all_gather"] + got.get("receive", 0),
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


@pytest.mark.parametrize("transport", ["native", "queued"])
@pytest.mark.parametrize("name", STEADY)
def test_a_step_grows_with_the_logarithm(name: str, transport: Transport) -> None:
    few, some, many = (counted(STEADY[name], ranks, transport) for ranks in (FEW, SOME, MANY))
    assert growing(few[1], some[1], many[1]) == []
    assert growing(few[0], some[0], many[0]) == []


def test_a_sum_over_ranks_grows_with_the_logarithm() -> None:
    """Peers that are alike have one share of the norm; those of a run differ, and are summed up in words."""

    def counts(ranks: int) -> tuple[Counter[str], dict[str, int]]:
        with alike_mesh(STEADY["zero1"], 1, ranks) as (mesh, asked):
            asked.reset()
            instructions = work(lambda: mesh.shard._total(words_of(0.3), "a test") and None)
            return instructions, {**asked.calls, "bytes": sum(asked.received_bytes.values())}

    few, some, many = (counts(ranks - 1) for ranks in (FEW, SOME, MANY))  # of which every digit is a one, the worst
    assert growing(few[0], some[0], many[0]) == []
    assert [each[1]["send"] for each in (few, some, many)] == [2 * 5, 2 * 8, 2 * 11]
    assert many[1]["bytes"] == 2 * 11 * 8 * WORDS


def test_a_few_ranks_ask_for_no_more_than_that() -> None:
    """8 ranks get each other's numbers in one operation; 4096 do not."""
    (_, few), (_, many) = counted(STEADY["zero1"], 8), counted(STEADY["zero1"], MANY)
    assert many["bytes got to agree"] <= 6 * few["bytes got to agree"], (few, many)
    assert many["operations"] <= few["operations"] + 8 * MANY.bit_length(), (few, many)


def test_a_loop_over_ranks_is_found() -> None:
    def work_of(ranks: int) -> Counter[str]:
        return work(lambda: [2 * rank for rank in range(ranks)] and None)

    assert len(growing(work_of(FEW), work_of(SOME), work_of(MANY))) == 1


def test_layout_has_no_table_of_ranks() -> None:
    with alike_mesh(PLANS["zero3"], 0, 16384) as (mesh, _):
        session = made(PLANS["zero3"], mesh, BLOCKS)
        for spec in session.engine.layout.chunks:
            assert sys.getsizeof(spec.bounds) < 100 and spec.uneven is None
            assert len(spec.bounds) == 16385 and spec.bounds[-1] == spec.padded_numel
        session.close()


def test_building_meets_no_table_of_ranks_in_python() -> None:
    """Layouts of 8 and of 16384 ranks take the same instructions."""
    counts = []
    for ranks in (8, 16384):
        with alike_mesh(STEADY["zero2"], 0, ranks) as (mesh, _):
            session = made(STEADY["zero2"], mesh, BLOCKS)
            facts, model, packing = session.engine.layout.facts, session.model, STEADY["zero2"].shard.packing
            counts.append(work(lambda f=facts, m=model, p=packing, r=ranks: make_layout(f, m, p, r, 1)))
            session.close()
    assert counts[0] == counts[1]
