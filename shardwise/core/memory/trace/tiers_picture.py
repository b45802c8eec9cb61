"""Where the bytes went: one bar for each tier, by kind, as SVG or as text."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from shardwise.core.base.sizes import size_text
from shardwise.core.memory.trace.picture import FONT, color_of, printable

__all__ = ["draw_tiers", "tiers_text"]

WIDTH, LEFT, RIGHT, ROW, TOP = 1120, 110, 28, 66, 72
SYMBOLS = "█▓▒░▚▞▤▥▦▧"
ASCII_SYMBOLS = "#=+-:*ox%@"
# A capacity that is further away than this many times the largest bar would press all bars flat.
FAR = 2.0


def _kinds(by_tier: Mapping[str, Mapping[str, int]]) -> list[str]:
    return list(dict.fromkeys(kind for held in by_tier.values() for kind, size in held.items() if size))


def _scale(by_tier: Mapping[str, Mapping[str, int]], capacities: Mapping[str, int | None]) -> float:
    """The bytes that fill the width: one scale for all tiers, so that they can be compared."""
    largest = max((sum(held.values()) for held in by_tier.values()), default=0)
    near = [c for c in capacities.values() if c is not None and c <= FAR * largest]
    return float(max([largest, *near, 1]))


def _facts(held: Mapping[str, int], capacity: int | None) -> str:
    total = sum(held.values())
    if capacity is None:
        return size_text(total)
    over = ", over its capacity" if total > capacity else ""
    return f"{size_text(total)} of {size_text(capacity)}{over}"


def _list(held: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(kind, 32)} {size_text(size)}" for kind, size in held.items() if size) or "nothing"


def draw_tiers(
    by_tier: Mapping[str, Mapping[str, int]],
    capacities: Mapping[str, int | None],
    title: str = "Where the bytes are",
) -> str:
    """A bar for each tier as SVG text.

    Args:
        by_tier: tier (``device``, ``host``, ``disk``) to bytes by kind (``parameters``, ``gathered``, ...).
        capacities: of the tiers, in bytes; a tier that is missing or None has no known limit.
        title: headline.
    """
    kinds = _kinds(by_tier)
    scale = _scale(by_tier, capacities)
    height = TOP + ROW * max(len(by_tier), 1) + 46
    room = WIDTH - LEFT - RIGHT
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"{FONT} font-size='13' fill='#333' role='img' aria-label='{escape(printable(title, 200))}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text x='{LEFT}' y='34' font-size='18' font-weight='600' fill='#111'>{escape(printable(title, 100))}</text>",
    ]
    for row, (tier, held) in enumerate(by_tier.items()):
        y = TOP + ROW * row
        capacity = capacities.get(tier)
        name = escape(printable(tier, 14))
        parts.append(f"<text x='{LEFT - 12}' y='{y + 30}' text-anchor='end' font-weight='600'>{name}</text>")
        facts = escape(f"{_facts(held, capacity)}: {_list(held)}")
        parts.append(f"<text x='{LEFT}' y='{y + 5}' font-size='12' fill='#555'>{facts}</text>")
        parts += _bar(held, kinds, y + 12, room / scale)
        if capacity is not None and capacity <= scale:
            box = f"<rect x='{LEFT}' y='{y + 12}' width='{capacity * room / scale:.1f}' height='28' fill='none'"
            parts.append(f"{box} stroke='#c0212b' stroke-width='1.5' stroke-dasharray='7 4'/>")
    x = float(LEFT)
    for kind in kinds:
        shown = printable(kind, 32)
        parts.append(f"<rect x='{x:.1f}' y='{height - 30}' width='13' height='13' fill='{color_of(kind, kinds)}'/>")
        parts.append(f"<text x='{x + 19:.1f}' y='{height - 19}'>{escape(shown)}</text>")
        x += 19 + 7.1 * len(shown) + 22
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ink(color: str) -> str:
    """Black or white, whichever is readable on ``#rrggbb``."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#111" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#fff"


def _bar(held: Mapping[str, int], kinds: list[str], y: float, points_per_byte: float) -> list[str]:
    parts = []
    x = float(LEFT)
    for kind in kinds:
        size = held.get(kind, 0)
        if size:
            width = size * points_per_byte
            tip = f"<title>{escape(printable(kind))}: {size_text(size)}</title>"
            box = f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='28' fill='{color_of(kind, kinds)}'"
            parts.append(f"{box}>{tip}</rect>")
            label = size_text(size)
            if width > 7.5 * len(label) + 10:
                parts.append(
                    f"<text x='{x + width / 2:.1f}' y='{y + 18.5}' text-anchor='middle' font-size='12' "
                    f"fill='{_ink(color_of(kind, kinds))}'>{label}</text>"
                )
            x += width
    return parts


def tiers_text(
    by_tier: Mapping[str, Mapping[str, int]],
    capacities: Mapping[str, int | None],
    width: int = 100,
    ascii_only: bool = False,
) -> str:
    """The same for a terminal; arguments as for :func:`draw_tiers`. A ``|`` stands where a capacity ends."""
    symbols = ASCII_SYMBOLS if ascii_only else SYMBOLS
    kinds = _kinds(by_tier)
    symbol = {kind: symbols[i % len(symbols)] for i, kind in enumerate(kinds)}
    scale = _scale(by_tier, capacities)
    name_width = max((len(printable(tier, 14)) for tier in by_tier), default=0)
    facts = {tier: _facts(held, capacities.get(tier)) for tier, held in by_tier.items()}
    room = max(width - name_width - 3 - max(map(len, facts.values()), default=0), 10)
    lines = []
    for tier, held in by_tier.items():
        cells: list[str] = []
        total = 0
        for kind in kinds:
            total += held.get(kind, 0)
            cells += [symbol[kind]] * (round(room * total / scale) - len(cells))
        cells += [" "] * (room + 1 - len(cells))
        capacity = capacities.get(tier)
        if capacity is not None and capacity <= scale:
            cells[min(round(room * capacity / scale), room)] = "|"
        lines.append(f"{printable(tier, 14):<{name_width}} {''.join(cells)} {facts[tier]}")
    lines.append("  ".join(f"{symbol[kind]} {printable(kind, 32)}" for kind in kinds))
    lines += [f"{printable(tier, 14):<{name_width}} {_list(held)}" for tier, held in by_tier.items()]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return text.encode("ascii", "replace").decode() if ascii_only else text
