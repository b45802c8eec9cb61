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
JUDGED_TURNS = 3
QUIET_CORES = 0.3
"""A goal is judged only from so many turns, with the peer in both malloc settings, on a machine where other
processes kept at most so many cores busy; otherwise a ratio says little and is printed without a verdict."""
PAIRS = {
    "sw_ddp": ("local", "ddp"),
    "sw_zero1": ("local", "ddp", "ds1"),
    "sw_zero2": ("local", "ddp", "ds2"),
    "sw_zero3": ("local", "ddp", "fsdp2", "ds3", "ds3_release"),
    "sw_gemini": ("fsdp2", "ds3"),
}
"""With whom each of our plans trains in turns."""
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
    "sw_gemini": "shardwise gemini",
}


@dataclass(frozen=True)
class Cell:
    """One system under one key: the turns of each malloc setting, and the better setting of each measure.

    Attributes:
        speeds: tokens/s by turn, of each malloc setting.
        speed_malloc: the setting whose median is higher.
        peak_bytes: the lower of the settings' median peaks.
        foreign_cores: what others kept busy in the median of its turns.
        worst_loss: largest relative difference from the reference, NaN where there is no reference.
    """

    system: str
    speeds: dict[bool, dict[int, float]]
    speed_malloc: bool
    peak_bytes: float
    peak_malloc: bool
    peak_at_speed_bytes: float
    foreign_cores: float
    worst_loss: float
    error: str

    @property
    def speed(self) -> float:
        """Median tokens/s in the faster malloc setting, 0 where the system failed."""
        return statistics.median(self.speeds[self.speed_malloc].values()) if self.speeds else 0.0


def losses_differ(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the steps both have; NaN where one has none."""
    pairs = list(zip(losses, reference, strict=False))
    return max((abs(a - b) / abs(b) for a, b in pairs), default=math.nan)


def _cell(system: str, outcomes: list[Outcome], reference: Sequence[float]) -> Cell:
    good = [outcome for outcome in outcomes if not outcome.error]
    if not good:
        return Cell(system, {}, False, math.nan, False, math.nan, 0.0, math.nan, outcomes[0].error)
    by_malloc: dict[bool, list[Outcome]] = {}
    for outcome in good:
        by_malloc.setdefault(outcome.job.raised_malloc, []).append(outcome)
    speeds = {flag: {o.turn: o.tokens_per_second for o in group} for flag, group in by_malloc.items()}
    peaks = {flag: statistics.median(o.peak_bytes for o in group) for flag, group in by_malloc.items()}
    fastest = max(speeds, key=lambda flag: statistics.median(speeds[flag].values()))
    smallest = min(peaks, key=peaks.__getitem__)
    failed = [f"{'with' if o.job.raised_malloc else 'without'} +m: {o.error}" for o in outcomes if o.error]
    return Cell(
        system=system,
        speeds=speeds,
        speed_malloc=fastest,
        peak_bytes=peaks[smallest],
        peak_malloc=smallest,
        peak_at_speed_bytes=peaks[fastest],
        foreign_cores=statistics.median(outcome.foreign_cores for outcome in good),
        worst_loss=max((losses_differ(outcome.losses, reference) for outcome in good), default=math.nan),
        error=f"{len(failed)} failed, {failed[0]}" if failed else "",
    )


def cells(outcomes: Sequence[Outcome]) -> dict[Key, dict[str, Cell]]:
    """Group by key and system, in order of appearance. The reference is used and left out."""
    grouped: dict[Key, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        key = (outcome.job.size, outcome.job.data_ranks, outcome.job.dtype)
        grouped.setdefault(key, {}).setdefault(outcome.job.system, []).append(outcome)
    table: dict[Key, dict[str, Cell]] = {}
    for key, systems in grouped.items():
        reference = next((o.losses for o in systems.get("reference", []) if not o.error), ())
        table[key] = {name: _cell(name, group, reference) for name, group in systems.items() if name != "reference"}
    return table


def _ratios(own: Cell, peer: Cell) -> list[float]:
    """own/peer of every turn that both had, in the peer's malloc setting that is better for the peer; ours is one."""
    of_settings = []
    for mine in own.speeds.values():
        for theirs in peer.speeds.values():
            found = [mine[turn] / theirs[turn] for turn in mine if turn in theirs]
            if found:
                of_settings.append(found)
    return min(of_settings, key=statistics.median, default=[])


def _equal(cell: Cell, dtype: str) -> str:
    if math.isnan(cell.worst_loss):
        return "–"
    return f"{'yes' if cell.worst_loss <= TOLERANCE[dtype] else 'NO'} ({cell.worst_loss:.0e})"


def _pair(own: Cell, peer: Cell, ranks: int) -> str:
    if not own.speeds or not peer.speeds:
        return "failed"
    ratios = _ratios(own, peer)
    if not ratios:
        return ""
    ratio = statistics.median(ratios)
    target = TARGETS.get((own.system, peer.system), 0.0) if ranks == 4 else 0.0
    mark = f"; goal {target:g}: {_verdict(own, peer, ratio >= target, len(ratios))}" if target else ""
    return f"{ratio:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}{mark}) / {own.peak_bytes / peer.peak_bytes:.2f}x"


def _verdict(own: Cell, peer: Cell, reached: bool, turns: int) -> str:
    """Whether speed and memory reach the goal, or why that cannot be said."""
    if turns < JUDGED_TURNS:
        return f"not judged, under {JUDGED_TURNS} turns"
    if len(peer.speeds) < 2:
        return "not judged, one malloc setting"
    if max(own.foreign_cores, peer.foreign_cores) > QUIET_CORES:
        return "not judged, machine busy"
    return "met" if reached and own.peak_bytes < peer.peak_bytes else "missed"


def ratio_table(table: dict[Key, dict[str, Cell]]) -> str:
    """Rows: size, ranks, dtype and one of our plans. Cells: tokens/s (least to most) and peak memory, as multiples."""
    measured = {system for row in table.values() for system in row}
    peers = [peer for peer in dict.fromkeys(p for row in PAIRS.values() for p in row) if peer in measured]
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
    """Rows: every system, failed ones with their reason. Medians over turns; ``+m``: raised malloc thresholds."""
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
            ratios = _ratios(cell, row["local"]) if "local" in row else []
            share = f"{statistics.median(ratios):.2f}" if ratios else ""
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
