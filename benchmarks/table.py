"""From outcomes to Markdown: one table of ratios, one of what was measured. Pure functions, no processes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import Outcome

__all__ = ["Cell", "Key", "cells", "losses_differ", "measured_table", "ratio_table", "replace_section"]

Key = tuple[str, int, str]
"""(size, ranks, dtype): everything within one key is comparable."""

MIB = 1024**2
TOLERANCE = {"fp32": 2e-5, "bf16": 1e-3}
"""Largest accepted relative difference of any of the first losses from the one-process reference. bf16 gradients are
rounded before or after they are summed, and at every hop of a ring, so systems differ among themselves too."""
TARGETS = {
    ("sw_zero3", "fsdp2"): 1.6,
    ("sw_zero3", "ds3"): 1.6,
    ("sw_zero2", "ds2"): 1.5,
    ("sw_zero2", "ddp"): 0.95,
}
"""Speed ratios to reach on 4 ranks; less peak memory than the peer in each pair."""
JUDGED_REPEATS = 3
QUIET_CORES = 0.3
"""A goal is judged only from so many repeats, with the peer in both malloc settings, on a machine where other
processes kept at most so many cores busy; otherwise a ratio says little and is printed without a verdict."""
STEADY = 1.15
"""Within a repeat two runs are compared only if the machine's own speed beside them differed by at most this factor."""
PAIRS = {
    "sw_ddp": ("local", "ddp"),
    "sw_zero1": ("local", "ddp", "ds1"),
    "sw_zero2": ("local", "ddp", "ds2"),
    "sw_zero3": ("local", "ddp", "fsdp2", "ds3"),
}
NAMES = {
    "local": "no communication",
    "ddp": "torch DDP",
    "fsdp2": "torch FSDP2",
    "ds1": "DeepSpeed ZeRO-1",
    "ds2": "DeepSpeed ZeRO-2",
    "ds3": "DeepSpeed ZeRO-3",
    "ds3_release": "DeepSpeed ZeRO-3, releasing",
    "sw_ddp": "shardwise ddp",
    "sw_zero1": "shardwise zero1",
    "sw_zero2": "shardwise zero2",
    "sw_zero3": "shardwise zero3",
}


@dataclass(frozen=True)
class Cell:
    """One system under one key: the repeats of each malloc setting, and the better setting of each measure.

    Attributes:
        speeds: tokens/s by repeat number, in the malloc setting whose median is higher.
        paces: the machine's speed beside those runs, where it was measured.
        peak_bytes: the lower of the settings' median peaks.
        settings: malloc settings that were measured.
        foreign_cores: most that others kept busy in any of its runs.
        worst_loss: largest relative difference from the reference, NaN where there is no reference.
    """

    system: str
    speeds: dict[int, float]
    paces: dict[int, float]
    speed_malloc: bool
    peak_bytes: float
    peak_malloc: bool
    peak_at_speed_bytes: float
    settings: int
    foreign_cores: float
    worst_loss: float
    error: str

    @property
    def speed(self) -> float:
        """Median tokens/s, 0 where the system failed."""
        return statistics.median(self.speeds.values()) if self.speeds else 0.0


def losses_differ(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the steps both have; NaN where one has none."""
    pairs = list(zip(losses, reference, strict=False))
    return max((abs(a - b) / abs(b) for a, b in pairs), default=math.nan)


def _cell(system: str, outcomes: list[Outcome], reference: list[float]) -> Cell:
    good = [outcome for outcome in outcomes if not outcome.error]
    if not good:
        return Cell(system, {}, {}, False, math.nan, False, math.nan, 0, 0.0, math.nan, outcomes[0].error)
    by_malloc: dict[bool, list[Outcome]] = {}
    for outcome in good:
        by_malloc.setdefault(outcome.job.raised_malloc, []).append(outcome)
    speeds = {flag: statistics.median(o.tokens_per_second for o in group) for flag, group in by_malloc.items()}
    peaks = {flag: statistics.median(o.peak_bytes for o in group) for flag, group in by_malloc.items()}
    fastest, smallest = max(speeds, key=speeds.__getitem__), min(peaks, key=peaks.__getitem__)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    return Cell(
        system=system,
        speeds={outcome.repeat: outcome.tokens_per_second for outcome in by_malloc[fastest]},
        paces={outcome.repeat: outcome.pace for outcome in by_malloc[fastest] if outcome.pace},
        speed_malloc=fastest,
        peak_bytes=peaks[smallest],
        peak_malloc=smallest,
        peak_at_speed_bytes=peaks[fastest],
        settings=len(by_malloc),
        foreign_cores=max(outcome.foreign_cores for outcome in good),
        worst_loss=max((losses_differ(outcome.losses, reference) for outcome in good), default=math.nan),
        error=f"{len(failed)} of {len(outcomes)} runs failed: {failed[0]}" if failed else "",
    )


def cells(outcomes: Sequence[Outcome]) -> dict[Key, dict[str, Cell]]:
    """Group by key and system, in order of appearance. The reference is used and left out."""
    grouped: dict[Key, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        key = (outcome.job.size, outcome.job.data_ranks, outcome.job.dtype)
        grouped.setdefault(key, {}).setdefault(outcome.job.system, []).append(outcome)
    table: dict[Key, dict[str, Cell]] = {}
    for key, systems in grouped.items():
        reference = next((o.losses for o in systems.get("reference", []) if not o.error), [])
        table[key] = {name: _cell(name, group, reference) for name, group in systems.items() if name != "reference"}
    return table


def _comparable(own: Cell, peer: Cell) -> list[int]:
    """Repeats of both in which the machine was as fast for the one as for the other, as far as that was measured."""
    found = []
    for repeat in own.speeds:
        paces = own.paces.get(repeat, 1.0), peer.paces.get(repeat, 1.0)
        measured = repeat in own.paces and repeat in peer.paces
        if repeat in peer.speeds and not (measured and max(paces) > STEADY * min(paces)):
            found.append(repeat)
    return found


def _ratio(own: Cell, peer: Cell) -> float:
    """Median over comparable repeats of own/peer; over all that both have where none is comparable."""
    repeats = _comparable(own, peer) or [repeat for repeat in own.speeds if repeat in peer.speeds]
    return statistics.median(own.speeds[r] / peer.speeds[r] for r in repeats) if repeats else math.nan


def _equal(cell: Cell, dtype: str) -> str:
    if math.isnan(cell.worst_loss):
        return "–"
    return f"{'yes' if cell.worst_loss <= TOLERANCE[dtype] else 'NO'} ({cell.worst_loss:.0e})"


def _pair(own: Cell, peer: Cell, ranks: int) -> str:
    if not own.speeds or not peer.speeds:
        return "failed"
    ratio = _ratio(own, peer)
    target = TARGETS.get((own.system, peer.system), 0.0) if ranks == 4 else 0.0
    mark = f" (goal {target:g}: {_verdict(own, peer, ratio >= target)})" if target else ""
    return f"{ratio:.2f}x{mark} / {own.peak_bytes / peer.peak_bytes:.2f}x"


def _verdict(own: Cell, peer: Cell, reached: bool) -> str:
    """Whether speed and memory reach the goal, or why that cannot be said."""
    if min(len(own.speeds), len(peer.speeds)) < JUDGED_REPEATS:
        return f"not judged, under {JUDGED_REPEATS} repeats"
    if peer.settings < 2:
        return "not judged, one malloc setting"
    if max(own.foreign_cores, peer.foreign_cores) > QUIET_CORES:
        return "not judged, machine busy"
    if len(_comparable(own, peer)) < JUDGED_REPEATS:
        return "not judged, the machine changed its speed"
    return "met" if reached and own.peak_bytes < peer.peak_bytes else "missed"


def ratio_table(table: dict[Key, dict[str, Cell]]) -> str:
    """Rows: size, ranks, dtype and one of our plans. Cells: tokens/s and peak memory as multiples of the peer's."""
    peers = list(dict.fromkeys(peer for row in PAIRS.values() for peer in row))
    lines = [
        "| model | ranks | dtype | plan | " + " | ".join(f"vs {NAMES[peer]}" for peer in peers) + " | losses equal |",
        "|---" * (len(peers) + 5) + "|",
    ]
    for (size, ranks, dtype), row in table.items():
        for system, own in row.items():
            if system not in PAIRS:
                continue
            compared = [_pair(own, row[peer], ranks) if peer in PAIRS[system] and peer in row else "" for peer in peers]
            head = f"| {size} | {ranks} | {dtype} | {system.removeprefix('sw_')} | "
            lines.append(head + " | ".join(compared) + f" | {_equal(own, dtype)} |")
    return "\n".join(lines)


def measured_table(table: dict[Key, dict[str, Cell]]) -> str:
    """Rows: every system, failed ones with their reason. Medians over repeats; ``+m``: raised malloc thresholds."""
    lines = [
        "| model | ranks | dtype | system | tokens/s | of no communication | peak MiB a rank | losses equal | remark |",
        "|---" * 9 + "|",
    ]
    for (size, ranks, dtype), row in table.items():
        for system, cell in row.items():
            head = f"| {size} | {ranks} | {dtype} | {NAMES.get(system, system)} | "
            if not cell.speeds:
                lines.append(f"{head}failed | | | | {cell.error.replace('|', '/')} |")
                continue
            share = f"{_ratio(cell, row['local']):.2f}" if "local" in row else ""
            equal = "own data" if system == "local" else _equal(cell, dtype)
            speed = f"{cell.speed:.0f}{' +m' if cell.speed_malloc else ''}"
            peak = f"{cell.peak_bytes / MIB:.0f}{' +m' if cell.peak_malloc else ''}"
            if cell.peak_malloc != cell.speed_malloc:
                peak += f" ({cell.peak_at_speed_bytes / MIB:.0f} at its best speed)"
            lines.append(f"{head}{speed} | {share} | {peak} | {equal} | {cell.error.replace('|', '/')} |")
    return "\n".join(lines)


def replace_section(path: Path, name: str, text: str) -> None:
    """Rewrite what stands between ``<!-- NAME:start -->`` and ``<!-- NAME:end -->`` in ``path``.

    Raises:
        ValueError: the file has no such section.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found, rest = path.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no section between {start} and {end}; add the two lines where it belongs")
    path.write_text(f"{before}{start}\n{text.strip()}\n{end}{after}")
