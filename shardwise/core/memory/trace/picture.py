"""Memory traces as SVG for a browser, as text bars for a terminal, and as tables of numbers. Does not need torch.

In a picture of a step, the height at a moment is the maximal memory from it until the next moment: model data by kind
at the bottom, and everything else (activations, temporary tensors) on top.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from shardwise.core.base.sizes import BINARY, size_text
from shardwise.core.memory.trace.stats import NON_MODEL, MemStats, Moment

MODEL = "model data"
COLORS = {
    "parameters": "#4c78a8",
    "parameter shards": "#4c78a8",
    MODEL: "#8a96ad",
    "gathered": "#86b3d9",
    "gathered parameters": "#86b3d9",
    "buffers": "#9d9da5",
    "gradients": "#e07b39",
    "masters": "#b279a2",
    "optimizer state": "#54a24b",
    "masters and optimizer state": "#54a24b",
    "activations": "#f2cf5b",
    NON_MODEL: "#f2cf5b",
    "idle": "#d8d8d8",
}
MORE_COLORS = ("#439894", "#8c6d31", "#d67195", "#79706e", "#637939", "#7b4173")
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1120, 470, 92, 28, 100, 74
MAX_COLUMNS, MAX_TIPS, NAME_LENGTH, LEAST_BAND = 1000, 500, 48, 56
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
# A capacity further away than this would flatten the picture; it is mentioned instead of drawn.
FAR = 2.0


def shortened(text: str, length: int = NAME_LENGTH) -> str:
    """Return ``text`` without control characters, with its middle left out if it is longer than ``length``."""
    clean = _clean(text)
    return clean if len(clean) <= length else f"{clean[: length // 2 - 1]}…{clean[len(clean) - length // 2 :]}"


def color_of(kind: str, kinds: Sequence[str]) -> str:
    """Return the color of ``kind`` among all ``kinds`` of a picture."""
    unknown = [k for k in kinds if k not in COLORS]
    return COLORS.get(kind) or MORE_COLORS[unknown.index(kind) % len(MORE_COLORS)]


def kinds_of(moment: Moment) -> dict[str, int]:
    """Return all bytes of a moment by kind; model data of unknown kind is ``model data``."""
    known = {kind: size for kind, size in moment.kinds.items() if size}
    unnamed = max(moment.model_bytes - sum(known.values()), 0)
    return known | ({MODEL: unnamed} if unnamed else {}) | {NON_MODEL: moment.non_model_bytes}


@dataclass(frozen=True)
class _Column:
    """Adjacent moments of one phase that share a column of the picture; the highest of them is drawn."""

    first: int
    last: int
    moment: Moment


def _columns(moments: Sequence[Moment], most: int) -> list[_Column]:
    per_column = -(-len(moments) // most) if moments else 1
    columns: list[_Column] = []
    start = 0
    while start < len(moments):
        phase, end = moments[start].phase, start + 1
        while end < len(moments) and end - start < per_column and moments[end].phase == phase:
            end += 1
        columns.append(_Column(start, end - 1, max(moments[start:end], key=lambda m: m.total_bytes)))
        start = end
    return columns


def _tick_step(top: float) -> tuple[float, str, float]:
    """Return the distance of about five ticks up to ``top`` bytes, the unit, and the bytes of the unit."""
    unit = 0
    while top >= 1024 ** (unit + 1) and unit < len(BINARY) - 1:
        unit += 1
    factor = float(1024**unit)
    for fraction in (0.1, 0.2, 0.5, *STEPS) if unit else STEPS:
        if top / (fraction * factor) <= 6.5:
            return fraction * factor, BINARY[unit], factor
    return STEPS[-1] * factor, BINARY[unit], factor


def _text(x: float, y: float, text: str, **style: str | int) -> str:
    styles = {"font-size": 13, "fill": "#333"} | {k.replace("_", "-"): v for k, v in style.items()}
    attributes = " ".join(f"{key}='{value}'" for key, value in styles.items())
    return f"<text x='{x:.1f}' y='{y:.1f}' {attributes}>{escape(text)}</text>"


def _run_widths(moments: Sequence[Moment]) -> list[tuple[int, float]]:
    """Return (number of moments, width) for each run of moments of one phase."""
    lengths = [len(list(group)) for _, group in groupby(moments, key=lambda m: m.phase)]
    room = WIDTH - LEFT - RIGHT
    least = LEAST_BAND if len(lengths) * LEAST_BAND * 2 <= room else 0
    shares = [max(length / max(len(moments), 1) * room, least) for length in lengths]
    return [(length, share * room / sum(shares)) for length, share in zip(lengths, shares, strict=True)]


class _Frame:
    """Maps moments and bytes to coordinates of the drawing."""

    def __init__(self, stats: MemStats) -> None:
        self.columns = _columns(stats.moments, MAX_COLUMNS)
        self._runs = _run_widths(stats.moments)
        peak, capacity = stats.peak_bytes, stats.capacity_bytes
        self.shows_capacity = capacity is not None and 0 < capacity <= FAR * max(peak, 1)
        top = max(peak, capacity if capacity is not None and self.shows_capacity else 0, 1) * 1.06
        self.step, self.unit, self.factor = _tick_step(top)
        self.top = top
        self.base = HEIGHT - BOTTOM

    def x(self, moment: float) -> float:
        """Return the left edge of a moment. A phase of few moments (the optimizer's step) is widened to be visible."""
        left = float(LEFT)
        for length, width in self._runs:
            if moment <= length:
                return left + width * moment / length
            moment, left = moment - length, left + width
        return left

    def y(self, size_bytes: float) -> float:
        """Return the y coordinate of a size."""
        return self.base - (self.base - TOP) * min(size_bytes, self.top) / self.top


def draw(stats: MemStats, title: str = "Memory of one training step") -> str:
    """Return the trace as SVG text, for any number of moments.

    The picture shows the kinds of memory stacked over the moments of the step, the phases as shaded bands, the capacity
    (drawn if it is near the peak, mentioned if it is far above), and the peak with the name of its moment.

    Args:
        stats: the trace, of ``session.memory_stats()`` or :func:`trace_memory`.
        title: title of the picture.

    Examples:
        >>> from pathlib import Path
        >>> written = Path("memory.svg").write_text(shardwise.draw(stats))
    """
    frame = _Frame(stats)
    summary = f"peak {size_text(stats.peak_bytes)} on {shortened(stats.device)}, {len(stats.moments)} moments"
    if stats.capacity_bytes is not None:
        share = f" ({stats.peak_bytes / stats.capacity_bytes:.0%} used at the peak)" if stats.capacity_bytes else ""
        summary += f", capacity {size_text(stats.capacity_bytes)}{share}"
    kinds = list(dict.fromkeys(k for c in frame.columns for k in kinds_of(c.moment)))
    kinds = [k for k in kinds if k != NON_MODEL] + [NON_MODEL]
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"{FONT} role='img' aria-label='{escape(shortened(title, 200))}'>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#ffffff'/>",
        _text(LEFT, 30, shortened(title, 100), font_size=18, font_weight=600, fill="#111"),
        _text(LEFT, 52, summary, fill="#555"),
        *_bands(frame),
        *_grid(frame),
        *_areas(frame, kinds),
        *_capacity(frame, stats),
        *_peak(frame, stats),
        *_tips(frame),
        *_legend(kinds, LEFT, HEIGHT - 24),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bands(frame: _Frame) -> list[str]:
    """Return the phases as shaded background, with a name if there is room for it."""
    parts: list[str] = []
    start = 0
    columns = frame.columns
    for index, column in enumerate(columns):
        if index + 1 < len(columns) and columns[index + 1].moment.phase == column.moment.phase:
            continue
        left, right = frame.x(columns[start].first), frame.x(column.last + 1)
        phase = column.moment.phase
        shade = {"forward": "#f7f7f7", "backward": "#ececec", "step": "#e0e0e0"}[phase]
        parts.append(
            f"<rect x='{left:.1f}' y='{TOP}' width='{right - left:.1f}' height='{frame.base - TOP}' fill='{shade}'/>"
        )
        if right - left > 7 * len(phase) + 8:
            middle = (left + right) / 2
            parts.append(_text(middle, frame.base + 32, phase, text_anchor="middle", fill="#555"))
            line = f"<line x1='{left + 2:.1f}' x2='{right - 2:.1f}' y1='{frame.base + 18}' y2='{frame.base + 18}'"
            parts.append(f"{line} stroke='#999'/>")
        start = index + 1
    return parts


def _grid(frame: _Frame) -> list[str]:
    parts = []
    tick = 0
    while tick * frame.step <= frame.top:
        y = frame.y(tick * frame.step)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#dddddd'/>")
        label = f"{tick * frame.step / frame.factor:g} {frame.unit}" if tick else "0"
        parts.append(_text(LEFT - 8, y + 4, label, text_anchor="end", font_size=12))
        tick += 1
    return parts


def _areas(frame: _Frame, kinds: Sequence[str]) -> list[str]:
    """Return a closed path for each kind. Paths are stacked and change in steps."""
    floors = [0.0] * len(frame.columns)
    parts = []
    for kind in kinds:
        tops = [floor + kinds_of(c.moment).get(kind, 0) for floor, c in zip(floors, frame.columns, strict=True)]
        if tops != floors:
            there = "".join(_stair(frame, c, top) for c, top in zip(frame.columns, tops, strict=True))
            pairs = list(zip(frame.columns, floors, strict=True))
            back = "".join(_stair(frame, c, floor, backwards=True) for c, floor in reversed(pairs))
            parts.append(f"<path d='M{there[1:]}{back}Z' fill='{color_of(kind, kinds)}'/>")
        floors = tops
    return parts


def _stair(frame: _Frame, column: _Column, size_bytes: float, backwards: bool = False) -> str:
    left, right = frame.x(column.first), frame.x(column.last + 1)
    first, second = (right, left) if backwards else (left, right)
    y = frame.y(size_bytes)
    return f"L{first:.1f} {y:.1f}L{second:.1f} {y:.1f}"


def _capacity(frame: _Frame, stats: MemStats) -> list[str]:
    if not frame.shows_capacity or stats.capacity_bytes is None:
        return []
    y = frame.y(stats.capacity_bytes)
    line = f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'"
    label = f"capacity {size_text(stats.capacity_bytes)}"
    # Place the label at the end that is further from the peak.
    width = 7.0 * len(label)
    left = LEFT + 6 if frame.x(stats.peak_index) > (LEFT + WIDTH - RIGHT) / 2 else WIDTH - RIGHT - 10 - width
    return [
        f"{line} stroke='#c0212b' stroke-width='1.5' stroke-dasharray='7 4'/>",
        f"<rect x='{left:.1f}' y='{y + 4:.1f}' width='{width + 4:.1f}' height='17' fill='#fff' fill-opacity='0.8'/>",
        _text(left + 2, y + 17, label, fill="#c0212b", font_size=12),
    ]


def _peak(frame: _Frame, stats: MemStats) -> list[str]:
    if not stats.moments:
        return [_text((LEFT + WIDTH - RIGHT) / 2, (TOP + frame.base) / 2, "no moments", text_anchor="middle")]
    index = stats.peak_index
    moment = stats.moments[index]
    x, y = frame.x(index + 0.5), frame.y(moment.total_bytes)
    label = f"peak {size_text(moment.total_bytes)} at {shortened(moment.name)} ({moment.phase})"
    half = 3.6 * len(label)
    middle = min(max(x, LEFT + half), WIDTH - RIGHT - half)
    return [
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{TOP - 12}' y2='{y:.1f}' stroke='#111'/>",
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='#111'/>",
        _text(middle, TOP - 18, label, text_anchor="middle", font_weight=600, fill="#111"),
    ]


def _tips(frame: _Frame) -> list[str]:
    """Return the tooltips."""
    if len(frame.columns) > MAX_TIPS:
        return []
    parts = []
    for column in frame.columns:
        moment = column.moment
        sizes = ", ".join(f"{shortened(kind, 32)} {size_text(size)}" for kind, size in kinds_of(moment).items())
        tip = escape(f"{shortened(moment.name)} ({moment.phase}): {size_text(moment.total_bytes)} = {sizes}")
        left, right = frame.x(column.first), frame.x(column.last + 1)
        box = f"x='{left:.1f}' y='{TOP}' width='{right - left:.1f}' height='{frame.base - TOP}'"
        parts.append(f"<rect {box} fill='#000' fill-opacity='0'><title>{tip}</title></rect>")
    return parts


def _legend(kinds: Sequence[str], left: float, top: float) -> list[str]:
    parts = []
    x = left
    for kind in kinds:
        shown = shortened(kind, 32)
        parts.append(f"<rect x='{x:.1f}' y='{top}' width='13' height='13' fill='{color_of(kind, kinds)}'/>")
        parts.append(_text(x + 19, top + 11, shown))
        x += 19 + 7.1 * len(shown) + 22
    return parts


def timeline_text(stats: MemStats, width: int = 100, rows: int = 30, ascii_only: bool = False) -> str:
    """Return the trace as text: a bar for each moment or for adjacent ones.

    Args:
        stats: the trace.
        width: the largest number of columns, 40 or more.
        rows: about the largest number of lines.
        ascii_only: use ASCII characters only.

    Examples:
        >>> stats = shardwise.trace_memory(torch.nn.Linear(8, 4), torch.randn(2, 8))
        >>> text = shardwise.timeline_text(stats, width=80)
    """
    model, other, mark = ("#", ".", "<") if ascii_only else ("█", "░", "◀")
    columns = _columns(stats.moments, rows)
    top = max(stats.peak_bytes, 1)
    longest = min(max(width - 37, 8), 32)
    name_width = max((len(shortened(c.moment.name, longest)) for c in columns), default=0)
    room = max(width - name_width - len("backward   999.9 MiB < peak"), 1)
    lines = []
    for column in columns:
        moment = column.moment
        total = round(room * moment.total_bytes / top)
        filled = min(round(room * moment.model_bytes / top), total)
        bar = (model * filled + other * (total - filled)).ljust(room)
        peak = f" {mark} peak" if column.first <= stats.peak_index <= column.last else ""
        name = shortened(moment.name, longest)
        lines.append(f"{moment.phase:<8} {name:<{name_width}} {bar} {size_text(moment.total_bytes):>9}{peak}")
    lines.append(f"{model} model data  {other} {NON_MODEL}")
    text = "\n".join(lines) + "\n"
    return text.encode("ascii", "replace").decode() if ascii_only else text


TIERS_LEFT, TIERS_TOP, TIER_HEIGHT = 110, 72, 66
SYMBOLS = "█▓▒░▚▞▤▥▦▧"


def _kinds(by_tier: Mapping[str, Mapping[str, int]]) -> list[str]:
    return list(dict.fromkeys(kind for sizes in by_tier.values() for kind, size in sizes.items() if size))


def _scale(by_tier: Mapping[str, Mapping[str, int]], capacities: Mapping[str, int | None]) -> float:
    """Return the number of bytes that fill the width: one scale for all tiers, so that they can be compared."""
    largest = max((sum(sizes.values()) for sizes in by_tier.values()), default=0)
    near = [c for c in capacities.values() if c is not None and c <= FAR * largest]
    return float(max([largest, *near, 1]))


def _facts(sizes: Mapping[str, int], capacity: int | None) -> str:
    total = sum(sizes.values())
    if capacity is None:
        return size_text(total)
    return f"{size_text(total)} of {size_text(capacity)}{', over its capacity' if total > capacity else ''}"


def _list(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{shortened(kind, 32)} {size_text(size)}" for kind, size in sizes.items() if size) or "nothing"


def draw_tiers(
    by_tier: Mapping[str, Mapping[str, int]],
    capacities: Mapping[str, int | None],
    title: str = "Where the bytes are",
) -> str:
    """Return a bar for each tier as SVG text.

    Args:
        by_tier: tier (``device``, ``host``, ``disk``) to bytes by kind (``parameters``, ``gathered``, ...).
        capacities: capacities of the tiers in bytes; a tier that is missing or None has no known limit.
        title: title of the picture.

    Examples:
        >>> svg = shardwise.draw_tiers(session.memory().by_tier, {"device": 24 * 2**30})
    """
    kinds = _kinds(by_tier)
    scale = _scale(by_tier, capacities)
    height = TIERS_TOP + TIER_HEIGHT * max(len(by_tier), 1) + 46
    room = WIDTH - TIERS_LEFT - RIGHT
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"{FONT} font-size='13' fill='#333' role='img' aria-label='{escape(shortened(title, 200))}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        _text(TIERS_LEFT, 34, shortened(title, 100), font_size=18, font_weight=600, fill="#111"),
    ]
    for row, (tier, sizes) in enumerate(by_tier.items()):
        y = TIERS_TOP + TIER_HEIGHT * row
        capacity = capacities.get(tier)
        parts.append(_text(TIERS_LEFT - 12, y + 30, shortened(tier, 14), text_anchor="end", font_weight=600))
        facts = f"{_facts(sizes, capacity)}: {_list(sizes)}"
        parts.append(_text(TIERS_LEFT, y + 5, facts, font_size=12, fill="#555"))
        parts += _bar(sizes, kinds, y + 12, room / scale)
        if capacity is not None and capacity <= scale:
            box = f"<rect x='{TIERS_LEFT}' y='{y + 12}' width='{capacity * room / scale:.1f}' height='28' fill='none'"
            parts.append(f"{box} stroke='#c0212b' stroke-width='1.5' stroke-dasharray='7 4'/>")
    return "\n".join([*parts, *_legend(kinds, TIERS_LEFT, height - 30), "</svg>"]) + "\n"


def _ink(color: str) -> str:
    """Return black or white, depending on which is readable on the color ``#rrggbb``."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#111" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#fff"


def _bar(sizes: Mapping[str, int], kinds: list[str], y: float, points_per_byte: float) -> list[str]:
    parts = []
    x = float(TIERS_LEFT)
    for kind in kinds:
        size = sizes.get(kind, 0)
        if size:
            width = size * points_per_byte
            tip = f"<title>{escape(shortened(kind))}: {size_text(size)}</title>"
            box = f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='28' fill='{color_of(kind, kinds)}'"
            parts.append(f"{box}>{tip}</rect>")
            label = size_text(size)
            if width > 7.5 * len(label) + 10:
                ink = _ink(color_of(kind, kinds))
                parts.append(_text(x + width / 2, y + 18.5, label, text_anchor="middle", font_size=12, fill=ink))
            x += width
    return parts


def tiers_text(
    by_tier: Mapping[str, Mapping[str, int]],
    capacities: Mapping[str, int | None],
    width: int = 100,
) -> str:
    """Return a bar for each tier as text. A ``|`` marks the end of a capacity.

    Args:
        by_tier: tier (``device``, ``host``, ``disk``) to bytes by kind, as of :class:`MemoryReport`.
        capacities: capacities of the tiers in bytes; a tier that is missing or None has no known limit.
        width: characters in a line.

    Examples:
        >>> print(shardwise.tiers_text(session.memory().by_tier, {"device": 2**20}))  # doctest: +ELLIPSIS
        device...
    """
    kinds = _kinds(by_tier)
    symbol = {kind: SYMBOLS[i % len(SYMBOLS)] for i, kind in enumerate(kinds)}
    scale = _scale(by_tier, capacities)
    name_width = max((len(shortened(tier, 14)) for tier in by_tier), default=0)
    facts = {tier: _facts(sizes, capacities.get(tier)) for tier, sizes in by_tier.items()}
    room = max(width - name_width - 3 - max(map(len, facts.values()), default=0), 10)
    lines = []
    for tier, sizes in by_tier.items():
        cells: list[str] = []
        total = 0
        for kind in kinds:
            total += sizes.get(kind, 0)
            cells += [symbol[kind]] * (round(room * total / scale) - len(cells))
        cells += [" "] * (room + 1 - len(cells))
        capacity = capacities.get(tier)
        if capacity is not None and capacity <= scale:
            cells[min(round(room * capacity / scale), room)] = "|"
        lines.append(f"{shortened(tier, 14):<{name_width}} {''.join(cells)} {facts[tier]}")
    lines.append("  ".join(f"{symbol[kind]} {shortened(kind, 32)}" for kind in kinds))
    lines += [f"{shortened(tier, 14):<{name_width}} {_list(sizes)}" for tier, sizes in by_tier.items()]
    return "\n".join(line.rstrip() for line in lines) + "\n"


TOP_HOLDERS = 10


def stats_table(stats: MemStats) -> str:
    """Return the trace as text: totals, the composition of the peak, the highest moments, and a row for each moment."""
    capacity = "no known limit" if stats.capacity_bytes is None else _both(stats.capacity_bytes)
    lines = [
        f"device          {_clean(stats.device)}",
        f"capacity        {capacity}",
        f"peak            {_both(stats.peak_bytes)}",
        f"peak model      {_both(stats.peak_model_bytes)}",
        f"peak non-model  {_both(stats.peak_non_model_bytes)}",
        f"moments         {len(stats.moments)}",
    ]
    if stats.moments:
        peak = stats.moments[stats.peak_index]
        lines += ["", f"at the peak (moment {stats.peak_index}, {_clean(peak.name)}, {peak.phase}):"]
        holders = sorted(kinds_of(peak).items(), key=lambda item: -item[1])
        lines += [f"  {_clean(kind):<32} {_both(size)}" for kind, size in holders]
        highest = sorted(range(len(stats.moments)), key=lambda i: -stats.moments[i].total_bytes)[:TOP_HOLDERS]
        lines += ["", "highest moments:"]
        for i in highest:
            moment = stats.moments[i]
            lines.append(f"  {i:>6} {moment.phase:<8} {_both(moment.total_bytes)}  {_clean(moment.name)}")
    lines += ["", f"{'moment':>6} {'unit':>5} {'phase':<8} {'model bytes':>16} {'non-model bytes':>16}  name"]
    for i, m in enumerate(stats.moments):
        numbers = f"{m.model_bytes:>16} {m.non_model_bytes:>16}"
        lines.append(f"{i:>6} {m.unit:>5} {m.phase:<8} {numbers}  {_clean(m.name)}")
    return "\n".join(lines) + "\n"


def dump_memory_stats(stats: MemStats, path: str | os.PathLike[str]) -> None:
    """Write the trace as a text table: totals, the composition of the peak, the highest moments, and a row for each
    moment.

    Args:
        stats: the trace.
        path: the file, which is replaced.

    Examples:
        >>> stats = shardwise.trace_memory(torch.nn.Linear(8, 4), torch.randn(2, 8))
        >>> shardwise.dump_memory_stats(stats, "trace.txt")
    """
    Path(path).write_text(stats_table(stats), encoding="utf-8")


def _both(size_bytes: int) -> str:
    return f"{size_bytes:>16} bytes ({size_text(size_bytes)})"


def _clean(name: str) -> str:
    # A line break in a name must not start a new row.
    return "".join(c if c.isprintable() else "?" for c in name)
