"""A memory trace as a text file: ``dump_memory_stats``.

Source of the behaviour: ColossalAI's ``ShardedModelV2.dump_memory_stats``, which lists model and non-model data for
each operation. Here with names, kinds and exact numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.core.base.sizes import size_text
from shardwise.core.memory.trace.picture import kinds_of
from shardwise.core.memory.trace.stats import MemStats

__all__ = ["dump_memory_stats", "stats_table"]

TOP_HOLDERS = 10


def stats_table(stats: MemStats) -> str:
    """The trace as text: totals, what held the most at the peak, the highest moments, and a row for each moment."""
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
    """Write :func:`stats_table` to ``path``."""
    Path(path).write_text(stats_table(stats), encoding="utf-8")


def _both(size_bytes: int) -> str:
    return f"{size_bytes:>16} bytes ({size_text(size_bytes)})"


def _clean(name: str) -> str:
    # A name with a line break must not make a row of its own.
    return "".join(c if c.isprintable() else "?" for c in name)
