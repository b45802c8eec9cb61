"""The pictures: valid SVG of any trace, with areas that have the right heights, and names as data."""

from __future__ import annotations

import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

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
from shardwise.core.memory.trace.stats import MemStats, Moment, Phase

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
