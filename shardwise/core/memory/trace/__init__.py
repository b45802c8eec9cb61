"""The memory trace: the memory of a step at each moment, recorded, summarised and drawn.

It makes no decisions about placement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.core.memory.trace.picture import draw, draw_tiers, dump_memory_stats, tiers_text, timeline_text
from shardwise.core.memory.trace.stats import MemStats

if TYPE_CHECKING:
    from shardwise.core.memory.trace.standalone import trace_memory

__all__ = ["MemStats", "draw", "draw_tiers", "dump_memory_stats", "tiers_text", "timeline_text", "trace_memory"]


def __getattr__(name: str) -> Any:
    # A saved trace is drawn without torch, which takes seconds to import.
    if name == "trace_memory":
        from shardwise.core.memory.trace.standalone import trace_memory

        return trace_memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
