"""Memory traces: recording, files, and the arithmetic of budgets, on traces made by hand.

The pictures: valid SVG of any trace, with areas that have the right heights, and names as data.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwise.core.base.sizes import parse_size
from shardwise.core.memory.trace import picture
from shardwise.core.memory.trace.picture import (
    REST,
    draw,
    draw_tiers,
    dump_memory_stats,
    stats_table,
    tiers_text,
    timeline_text,
)
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


SVG = "{http://www.w3.org/2000/svg}"


def make(count: int, capacity: int | None = None) -> MemStats:
    rng = random.Random(count)
    moments = []
    for i in range(count):
        phase: Phase = "forward" if i < count * 0.4 else "backward" if i < count * 0.95 else "step"
        model = rng.randrange(1 << 28)
        moments.append(Moment(i, f"layers.{i}", phase, model, rng.randrange(1 << 30), {"parameters": model // 2}))
    return MemStats(moments, "cpu", capacity)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 499, 1001, 5000])
@pytest.mark.parametrize("capacity", [None, 0, 1 << 20, 1 << 30, 1 << 50])
def test_it_is_svg_of_bounded_size(count: int, capacity: int | None) -> None:
    stats = make(count, capacity)
    text = draw(stats)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and "nan" not in text and "inf" not in text
    assert len(text) < 300_000
    for x in re.findall(r" x='(-?[0-9.]+)'", text):
        assert 0 <= float(x) <= picture.WIDTH
    shown = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    if count:
        peak = stats.moments[stats.peak_index]
        assert f"at {peak.name} ({peak.phase})" in shown
    else:
        assert "no moments" in shown
    drawn = any(t.text and t.text.startswith("capacity") for t in root.iter(f"{SVG}text"))
    assert drawn == (capacity is not None and 0 < capacity <= 2 * max(stats.peak_bytes, 1))


def test_heights_are_the_sizes() -> None:
    """The top of each kind's area, read back from the paths in bytes."""
    moments = [
        Moment(0, "a", "forward", 100, 50, {"parameters": 100}),
        Moment(1, "b", "forward", 300, 500, {"parameters": 100, "gradients": 150}),
        Moment(0, "a", "backward", 250, 0, {"parameters": 100, "gradients": 150}),
    ]
    root = ElementTree.fromstring(draw(MemStats(moments, "cpu", 1000)))
    top = 1000 * 1.06
    heights: dict[str, list[int]] = {}
    for path in root.iter(f"{SVG}path"):
        points = [tuple(map(float, p.split())) for p in re.findall(r"[-0-9.]+ [-0-9.]+", path.get("d") or "")]
        base = picture.HEIGHT - picture.BOTTOM
        sizes = [round((base - y) / (base - picture.TOP) * top) for _, y in points[: len(points) // 2 : 2]]
        heights[path.get("fill") or ""] = sizes
    color = {kind: picture.color_of(kind, []) for kind in ("parameters", "gradients", picture.MODEL, REST)}

    def near(found: list[int], expected: list[int]) -> bool:
        return len(found) == len(expected) and all(abs(a - b) <= 2 for a, b in zip(found, expected, strict=True))

    assert near(heights[color["parameters"]], [100, 100, 100])
    assert near(heights[color["gradients"]], [100, 250, 250])
    assert near(heights[color[picture.MODEL]], [100, 300, 250])  # what no kind accounts for
    assert near(heights[color[REST]], [150, 800, 250])


EVIL = "</text><script>alert('x')</script>&\"\x00\x1b[31m\n" + "long" * 50


def test_names_are_data() -> None:
    stats = MemStats([Moment(0, EVIL, "forward", 5, 5, {EVIL: 3})], EVIL)
    for text in (draw(stats, EVIL), draw_tiers({EVIL: {EVIL: 5}}, {EVIL: 3}, EVIL)):
        root = ElementTree.fromstring(text)
        assert not list(root.iter(f"{SVG}script")) and "\x1b" not in text and "\x00" not in text
    for text in (timeline_text(stats), tiers_text({EVIL: {EVIL: 5}}, {}), stats_table(stats)):
        assert "\x1b" not in text and "\x00" not in text
    assert timeline_text(stats).count("\n") == 2


def test_the_table(tmp_path: Path) -> None:
    stats = make(40, 1 << 31)
    dump_memory_stats(stats, tmp_path / "s.txt")
    text = (tmp_path / "s.txt").read_text()
    peak = stats.moments[stats.peak_index]
    assert f"{stats.peak_bytes} bytes" in text and f"(moment {stats.peak_index}, {peak.name}, {peak.phase})" in text
    rows = text.split("name\n", 1)[1].splitlines()
    assert len(rows) == 40
    for row, m in zip(rows, stats.moments, strict=True):
        assert row.split()[1:] == [str(m.unit), m.phase, str(m.model_bytes), str(m.non_model_bytes), m.name]
    assert "no known limit" in stats_table(make(0))
