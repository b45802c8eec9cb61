"""Draws the pictures of docs/: ``make pictures``. Data of the library is taken from there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from shardwise.core.grads.chunk_grads import REDUCTION, Reduction
from shardwise.core.shards.chunk import RESIDENCY, Residency

__all__ = ["PICTURES", "benchmarks", "chunk_life", "divided", "gradient_life", "main", "one_step", "three_memories"]

FOLDER = Path(__file__).parent
FONT = "font-family='sans-serif'"
INK, SOFT, LINE = "#263238", "#546e7a", "#78909c"
SHARD, WHOLE, GRADIENT, UPDATE = "#bbdefb", "#c8e6c9", "#ffe0b2", "#e1bee7"


def _text(x: float, y: float, text: str, size: int = 14, color: str = INK, anchor: str = "middle") -> str:
    style = f"{FONT} font-size='{size}' fill='{color}' text-anchor='{anchor}'"
    return f"<text x='{x}' y='{y}' {style}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str, *lines: str, size: int = 14) -> str:
    middle = y + height / 2 + 5 - (size + 4) / 2 * (len(lines) - 1)
    words = "".join(_text(x + width / 2, middle + (size + 4) * row, line, size) for row, line in enumerate(lines))
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{LINE}'/>{words}"


def _arrow(points: Sequence[tuple[float, float]]) -> str:
    way = " ".join(f"{x},{y}" for x, y in points)
    return f"<polyline points='{way}' fill='none' stroke='{INK}' stroke-width='1.5' marker-end='url(#head)'/>"


def _picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = "<marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>",
        f"<title>{escape(title)}</title>",
        f"<defs>{head}<path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker></defs>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def one_step() -> str:
    """A step at stage 3 over two ranks, from left to right."""
    columns = [
        ("between steps", SHARD, ("a shard", "of each layer")),
        ("forward", WHOLE, ("gather a layer,", "compute, free it")),
        ("backward", WHOLE, ("gather it again,", "compute gradients")),
        ("backward", GRADIENT, ("reduce-scatter:", "a shard of the sum")),
        ("step", UPDATE, ("update masters,", "cast to the shard")),
    ]
    width, left, wide, gap = 1010, 90, 150, 34
    parts = [_text(left, 28, "One step at stage 3, two ranks", 20, anchor="start")]
    for number, (phase, fill, lines) in enumerate(columns):
        x = left + number * (wide + gap)
        parts.append(_text(x + wide / 2, 64, phase, 16, SOFT))
        parts += [_box(x, y, wide, 64, fill, *lines, size=16) for y in (80, 210)]
        if number:
            parts += [_arrow([(x - gap + 3, y + 32), (x - 4, y + 32)]) for y in (80, 210)]
        if number in (1, 2, 3):  # the ranks send to each other
            parts.append(_arrow([(x + 60, 146), (x + 60, 207)]))
            parts.append(_arrow([(x + 90, 208), (x + 90, 147)]))
    parts += [_text(44, y + 37, f"rank {rank}", 16, SOFT) for rank, y in enumerate((80, 210))]
    said = "For every layer. While one layer computes, the next is gathered and the gradients of the last are reduced."
    return _picture(width, 330, "One step", [*parts, _text(left, 308, said, 16, SOFT, anchor="start")])


PLACES = {
    Residency.UNPLACED: (40, 60),
    Residency.GATHERED: (640, 60),
    Residency.RENEWING: (940, 60),
    Residency.GATHERING: (640, 330),
    Residency.SHARDED: (40, 330),
}
WAYS: dict[tuple[Residency, Residency], tuple[list[tuple[float, float]], tuple[float, float]]] = {
    (Residency.UNPLACED, Residency.GATHERED): ([(180, 85), (636, 85)], (408, 76)),
    (Residency.UNPLACED, Residency.SHARDED): ([(90, 110), (90, 326)], (170, 220)),
    (Residency.SHARDED, Residency.GATHERING): ([(180, 345), (636, 345)], (408, 336)),
    (Residency.GATHERING, Residency.GATHERED): ([(730, 330), (730, 114)], (768, 220)),
    (Residency.GATHERING, Residency.SHARDED): ([(640, 368), (184, 368)], (408, 390)),
    (Residency.GATHERED, Residency.SHARDED): ([(660, 110), (184, 326)], (520, 240)),
    (Residency.GATHERED, Residency.RENEWING): ([(780, 76), (936, 76)], (858, 67)),
    (Residency.RENEWING, Residency.GATHERED): ([(940, 98), (784, 98)], (858, 118)),
}
"""How the arrows of the table run, and where their words stand."""


def chunk_life() -> str:
    """The table of a chunk's states, with every arrow of it."""
    parts = [_text(40, 28, "A chunk's life, as one rank has it", 20, anchor="start")]
    for state, (x, y) in PLACES.items():
        parts.append(_box(x, y, 140, 50, SHARD if state is Residency.SHARDED else WHOLE, state.name))
    for old, new, why in RESIDENCY:
        way, (x, y) = WAYS[old, new]
        parts += [_arrow(way), _text(x, y, why, 13, SOFT)]
    return _picture(1120, 420, "A chunk's life", parts)


PLACES_OF_GRADIENTS = {
    Reduction.EMPTY: (40, 90),
    Reduction.FILLING: (340, 90),
    Reduction.DEPOSITED: (640, 90),
    Reduction.REDUCING: (340, 330),
    Reduction.REDUCED: (640, 330),
}
WAYS_OF_GRADIENTS: dict[tuple[Reduction, Reduction], tuple[list[tuple[float, float]], tuple[float, float]]] = {
    (Reduction.EMPTY, Reduction.FILLING): ([(180, 105), (336, 105)], (258, 96)),
    (Reduction.EMPTY, Reduction.REDUCING): ([(70, 140), (70, 370), (336, 370)], (198, 391)),
    (Reduction.FILLING, Reduction.DEPOSITED): ([(480, 115), (636, 115)], (558, 76)),
    (Reduction.FILLING, Reduction.REDUCING): ([(410, 140), (410, 326)], (472, 240)),
    (Reduction.FILLING, Reduction.EMPTY): ([(340, 125), (184, 125)], (258, 145)),
    (Reduction.DEPOSITED, Reduction.REDUCING): ([(690, 140), (690, 290), (450, 290), (450, 326)], (572, 281)),
    (Reduction.DEPOSITED, Reduction.EMPTY): ([(710, 90), (710, 50), (110, 50), (110, 86)], (410, 42)),
    (Reduction.REDUCING, Reduction.REDUCED): ([(480, 345), (636, 345)], (558, 336)),
    (Reduction.REDUCING, Reduction.EMPTY): ([(360, 330), (360, 200), (130, 200), (130, 144)], (240, 191)),
    (Reduction.REDUCED, Reduction.REDUCING): ([(640, 368), (484, 368)], (562, 400)),
    (Reduction.REDUCED, Reduction.EMPTY): ([(710, 380), (710, 440), (40, 440), (40, 144)], (410, 432)),
}


def gradient_life() -> str:
    """The table of the states of a chunk's gradients, with every arrow of it."""
    parts = [_text(40, 28, "A chunk's gradients, from backward into the reduced shard", 20, anchor="start")]
    for state, (x, y) in PLACES_OF_GRADIENTS.items():
        parts.append(_box(x, y, 140, 50, GRADIENT if state is not Reduction.EMPTY else WHOLE, state.name))
    for old, new, why in REDUCTION:
        way, (x, y) = WAYS_OF_GRADIENTS[old, new]
        parts += [_arrow(way), _text(x, y, why, 13, SOFT)]
    return _picture(880, 470, "A chunk's gradients", parts)


def divided() -> str:
    """What of texts and layers each of two ranks has, by what is divided."""
    ways = [
        ("data", "other texts", (SHARD, SHARD, GRADIENT, GRADIENT), (WHOLE,) * 8),
        ("layers: tp", "parts of each layer", (WHOLE,) * 4, (SHARD, GRADIENT) * 4),
        ("stages: pp", "some of the layers", (WHOLE,) * 4, (SHARD,) * 4 + (GRADIENT,) * 4),
        ("sequences: sp", "parts of each text", (SHARD, GRADIENT) * 2, (WHOLE,) * 8),
    ]
    parts = [_text(40, 28, "Four things that two ranks can divide", 20, anchor="start")]
    for number, (name, said, texts, layers) in enumerate(ways):
        left = 30 + 245 * number
        parts += [_text(left + 110, 62, name, 15), _text(left + 110, 300, said, 13, SOFT)]
        for place, fill in enumerate(texts):  # two texts of two halves
            parts.append(_box(left + 110 * (place % 2), 78 + 30 * (place // 2), 110, 26, fill))
        for place, fill in enumerate(layers):  # four layers of two parts
            parts.append(_box(left + 110 * (place % 2), 158 + 30 * (place // 2), 110, 26, fill))
    for number, (fill, name) in enumerate(((SHARD, "rank 0"), (GRADIENT, "rank 1"), (WHOLE, "both ranks"))):
        parts.append(_box(250 + 190 * number, 325, 150, 28, fill, name))
    return _picture(1020, 370, "What ranks divide", parts)


def three_memories() -> str:
    """Device, host and disk, what is stored where, and what is copied between them."""
    memories = [
        ("Device", WHOLE, ["gathered layers", "activations", "shards stored here"], "fast, small: forward, backward"),
        (
            "Host memory",
            SHARD,
            ["masters, optimizer state", "reduced gradients", "parameter shards"],
            "larger: CPU updates",
        ),
        ("Disk", UPDATE, ["optimizer state", "masters", "parameter shards"], "largest: only storage"),
    ]
    parts = [_text(30, 28, "Three memories of a rank", 20, anchor="start")]
    for number, (name, fill, holds, said) in enumerate(memories):
        x = 30 + 340 * number
        parts += [_box(x, 72, 260, 150, fill, name, "", *holds, size=18), _text(x + 130, 250, said, 17, SOFT)]
    for x, there, back in ((290, "→ gradients", "← parameters"), (630, "→ state, updated", "← state, to update")):
        parts += [_arrow([(x + 6, 122), (x + 74, 122)]), _arrow([(x + 74, 177), (x + 6, 177)])]
        parts += [_text(x + 40, 62, there, 16, SOFT), _text(x + 40, 280, back, 16, SOFT)]
    return _picture(1000, 300, "Three memories", parts)


def benchmarks() -> str:
    """Speed and memory of each system in fp32, from the tables."""
    tables = (FOLDER.parent / "inside" / "benchmark-tables.md").read_text("utf-8")
    row = r"^\| small \| 4 \| fp32 \| ((?:shardwise|torch|DeepSpeed) [^|]+?) \| (\d+)[^|]*\|[^|]*\| (\d+)"
    rows = sorted(
        (system.replace("zero", "ZeRO-"), int(speed), int(memory))
        for system, speed, memory in re.findall(row, tables, re.MULTILINE)
    )
    parts = []
    for left, title, column in ((40, "tokens a second (more is better)", 1), (500, "MiB a rank (less is better)", 2)):
        parts.append(_text(left + 150, 28, title, 14, SOFT, "start"))
        most = max(each[column] for each in rows)
        for place, each in enumerate(rows):
            y, width = 44 + 30 * place, round(200 * each[column] / most)
            fill = UPDATE if each[0].startswith("shardwise") else SHARD
            parts.append(_text(left + 140, y + 16, each[0], 13, INK, "end"))
            parts.append(f"<rect x='{left + 150}' y='{y}' width='{width}' height='22' rx='3' fill='{fill}'/>")
            parts.append(_text(left + 158 + width, y + 16, str(each[column]), 13, INK, "start"))
    return _picture(960, 60 + 30 * len(rows), "Speed and memory of six systems", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "benchmarks.svg": benchmarks,
    "chunk-life.svg": chunk_life,
    "divided.svg": divided,
    "gradient-life.svg": gradient_life,
    "one-step.svg": one_step,
    "three-memories.svg": three_memories,
}


def main() -> None:
    """Write all of them beside this file."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
