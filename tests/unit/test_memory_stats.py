"""Memory traces: recording, files, and the arithmetic of budgets, on traces made by hand."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.base.sizes import parse_size
from shardwise.core.memory.trace.stats import MemoryRecorder, MemStats, Moment, Phase, margin_bytes, model_budget_bytes


def moment(unit: int, non_model: int, model: int = 0, phase: Phase = "forward", name: str = "m") -> Moment:
    return Moment(unit, name, phase, model, non_model)


class Peaks:
    """A tracker that says what it is told to."""

    def __init__(self) -> None:
        self.next = 0

    def take_peak(self) -> int:
        return self.next


def test_intervals_go_to_the_moment_before() -> None:
    peaks = Peaks()
    recorder = MemoryRecorder(peaks, device="cpu", capacity_bytes=1000, gathered_bytes={0: 10})
    for step in range(2):
        peaks.next = 7
        recorder.moment(0, "a", "forward", 100, {"parameters": 60})
        peaks.next = 30
        recorder.end_interval()
        peaks.next = 20
        recorder.moment(1, "b", "backward", 200)
        peaks.next = 40 + step
        recorder.moment(-1, "c", "step", 50)
        peaks.next = 5
        stats = recorder.finish()
        assert [m.non_model_bytes for m in stats.moments] == [30, 40 + step, 5]
        assert [m.model_bytes for m in stats.moments] == [100, 200, 50]
        assert stats.moments[0].kinds == {"parameters": 60} and stats.capacity_bytes == 1000
        assert (stats.peak_bytes, stats.peak_model_bytes, stats.peak_non_model_bytes) == (240 + step, 200, 40 + step)
        assert stats.peak_index == 1


STATS = MemStats(
    moments=[
        moment(3, 10),
        moment(1, 50),
        moment(1, 90),  # the same unit again: one use
        moment(-1, 60),  # no unit: part of the use before it
        moment(2, 30, phase="backward"),
        moment(1, 80, 500, phase="backward"),
        moment(-1, 5000, phase="step"),  # the step's own peak bounds no gathering
    ],
    device="cpu",
)


def test_positions_count_uses_of_units() -> None:
    assert STATS.order == (3, 1, 2, 1) and STATS.interval_bytes == (10, 90, 30, 80)
    assert STATS.matches([3, 1, 1, 2, 1]) and not STATS.matches([3, 1, 2]) and not STATS.matches([3, 2, 1, 1])
    assert STATS.follows([]) and STATS.follows([3, 3, 1]) and not STATS.follows([3, 2])
    assert not STATS.follows([3, 1, 2, 1, 3])


def budget(stats: MemStats | None, position: int, capacity: int = 1000, steady: float = 0.9) -> int:
    return model_budget_bytes(
        stats, position, capacity_bytes=capacity, warmup_non_model_ratio=0.8, steady_capacity_ratio=steady
    )


def test_budgets() -> None:
    assert budget(None, 0) == budget(None, 99) == 1000 - 800 + (math.floor(1000 * (1 - 0.8)) - 200)
    assert [budget(STATS, i) for i in range(4)] == [890, 810, 870, 820]
    assert budget(STATS, -1) == budget(STATS, 4) == 810  # unknown: as at the worst moment
    assert budget(STATS, 0, capacity=11) == 0 and budget(STATS, 3, capacity=80) == 0
    assert budget(MemStats([], "cpu"), 0) == 900


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf])
def test_bad_ratios(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"steady_capacity_ratio={ratio}"):
        budget(STATS, 0, steady=ratio)
    with pytest.raises(ValueError, match=f"margin_ratio={ratio}"):
        margin_bytes(STATS, capacity_bytes=1, steady_capacity_ratio=1, margin_ratio=ratio)
    with pytest.raises(ValueError, match="capacity_bytes=-1"):
        budget(STATS, 0, capacity=-1)


def test_margin_is_a_share_of_what_remains_at_the_tightest_moment() -> None:
    def margin(ratio: float, needed: int | None = None) -> int:
        return margin_bytes(
            STATS, capacity_bytes=10000, steady_capacity_ratio=0.9, margin_ratio=ratio, needed_bytes=needed
        )

    assert margin(1.0) == 9000 - 5000 and margin(0.25) == 1000 and margin(0.0) == 0
    assert margin(1.0, needed=600) == 9000 - 5000 - 600
    assert margin(1.0, needed=9000) == 0
    small = MemStats(STATS.moments[:6], "cpu")
    assert margin_bytes(small, capacity_bytes=1000, steady_capacity_ratio=1, margin_ratio=0.5) == (1000 - 580) // 2


def test_json_is_exact(tmp_path: Path) -> None:
    rng = random.Random(1)
    moments = [
        Moment(i - 1, 'layer "ä"\n<0>', "backward", 2**60 + i, rng.randrange(2**55), {"gradients": i})
        for i in range(50)
    ]
    stats = MemStats(moments, "cuda:0", 2**40, {7: 3, 0: 2**62})
    assert MemStats.from_json(stats.to_json()) == stats
    stats.save(tmp_path / "s.json")
    STATS.save(tmp_path / "s.json")  # replaced
    assert MemStats.load(tmp_path / "s.json") == STATS and os.listdir(tmp_path) == ["s.json"]
    with pytest.raises(FileNotFoundError):
        STATS.save(tmp_path / "nowhere" / "s.json")


def _changed(**changes: Any) -> str:
    return json.dumps(json.loads(STATS.to_json()) | changes)


ROW = [0, "a", "forward", 1, 2, {}]
BAD = [
    ("", "no JSON"),
    (_changed(version=2), "version 2"),
    (_changed(device=None), "device is None"),
    (_changed(capacity_bytes=-1), "capacity_bytes is -1"),
    (_changed(capacity_bytes=10**400), r"capacity_bytes is 2\*\*1328 and more, not a whole number from 0 to"),
    ("[" * 100_000, r"\['\.\.\. nests too deeply"),
    (_changed(moments=[ROW, ROW[:5]]), r"moments\[1\]"),
    (_changed(moments=[[-2, *ROW[1:]]]), r"moments\[0\]: unit is -2"),
    (_changed(moments=[[0, "a", "sideways", 1, 2, {}]]), "phase 'sideways'"),
    (_changed(moments=[[0, "a", "step", 1, -2, {}]]), "non_model_bytes is -2"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        MemStats.from_json(text)
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        MemStats.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("64MiB", 64 << 20), ("24GB", 24 * 10**9), ("1.5GiB", 3 << 29), (" 2 kib ", 2048), ("8tib", 8 << 40),
        (".5KB", 500), ("9007199254740993", 9007199254740993), ("10B", 10),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "nan", "12XB", "1 2", "0", "0.1B", "1,5GiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_size(text)
