"""The picture of :mod:`benchmarks.scale`: each quantity over the number of ranks, both by powers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["picture"]

COLORS = {"zero1": "#1565c0", "zero2": "#2e7d32", "zero3": "#c62828", "hybrid": "#6a1b9a"}
PANELS = (
    ("step_s", "host time a step, s"),
    ("calls", "function calls a step"),
    ("received_bytes", "agreement a step, bytes received"),
    ("table_bytes", "tables that a rank keeps, bytes"),
)
COUNTED = ("operations", "collectives a step")
"""In the place of the first, where no times were taken."""
INK, SOFT, LINE = "#263238", "#546e7a", "#cfd8dc"
WIDE, HIGH, LEFT, TOP, GAP = 400, 240, 70, 70, 90


def _text(x: float, y: float, text: str, size: int = 12, color: str = SOFT, anchor: str = "middle") -> str:
    style = f"font-family='sans-serif' font-size='{size}' fill='{color}' text-anchor='{anchor}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"


def _power(value: int) -> str:
    return f"10^{value}" if not 0 <= value <= 3 else str(10**value)


def _panel(rows: Sequence[Mapping[str, Any]], name: str, title: str, x: float, y: float) -> list[str]:
    found = [row for row in rows if row[name] > 0]
    if not found:
        return [_text(x + WIDE / 2, y + HIGH / 2, f"{title}: nothing")]
    first, last = (fold(math.log2(row["ranks"]) for row in found) for fold in (min, max))
    low = math.floor(min(math.log10(row[name]) for row in found))
    high = max(math.ceil(max(math.log10(row[name]) for row in found)), low + 1)

    def place(row: Mapping[str, Any]) -> tuple[float, float]:
        across = (math.log2(row["ranks"]) - first) / max(last - first, 1e-9)
        return x + across * WIDE, y + HIGH - (math.log10(row[name]) - low) / (high - low) * HIGH

    parts = [_text(x + WIDE / 2, y - 10, title, 14, INK)]
    for power in range(low, high + 1):
        at = y + HIGH - (power - low) / (high - low) * HIGH
        parts.append(f"<line x1='{x}' y1='{at:.1f}' x2='{x + WIDE}' y2='{at:.1f}' stroke='{LINE}'/>")
        parts.append(_text(x - 6, at + 4, _power(power), anchor="end"))
    for ranks in dict.fromkeys(row["ranks"] for row in found):
        parts.append(_text(place({"ranks": ranks, name: 10.0**low})[0], y + HIGH + 18, f"{ranks}"))
    for plan, blocks in dict.fromkeys((row["plan"], row["blocks"]) for row in found):
        own = [place(row) for row in found if (row["plan"], row["blocks"]) == (plan, blocks)]
        dashes = " stroke-dasharray='6 4'" if blocks > min(row["blocks"] for row in found) else ""
        way = " ".join(f"{px:.1f},{py:.1f}" for px, py in own)
        parts.append(f"<polyline points='{way}' fill='none' stroke='{COLORS[plan]}' stroke-width='2'{dashes}/>")
        parts += [f"<circle cx='{px:.1f}' cy='{py:.1f}' r='3' fill='{COLORS[plan]}'/>" for px, py in own]
    return parts


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """SVG of rows as :class:`benchmarks.scale.Row` has them."""
    width, height = 2 * (WIDE + LEFT) + 60, TOP + 2 * (HIGH + GAP)
    parts = [_text(width / 2, 28, "One rank's work by the number of ranks", 18, INK)]
    panels = PANELS if any(row[PANELS[0][0]] > 0 for row in rows) else (COUNTED, *PANELS[1:])
    for number, (name, title) in enumerate(panels):
        x, y = LEFT + number % 2 * (WIDE + LEFT + 20), TOP + number // 2 * (HIGH + GAP)
        parts += _panel(rows, name, title, x, y)
    blocks = sorted({row["blocks"] for row in rows})
    for number, plan in enumerate(dict.fromkeys(row["plan"] for row in rows)):
        x = LEFT + 110 * number
        parts.append(f"<rect x='{x}' y='{height - 26}' width='14' height='4' fill='{COLORS[plan]}'/>")
        parts.append(_text(x + 20, height - 19, plan, anchor="start"))
    parts.append(_text(width - 40, height - 19, f"lines: {blocks[0]} blocks, dashes: {blocks[-1]}", anchor="end"))
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>",
        "<title>One rank's work by the number of ranks</title>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
