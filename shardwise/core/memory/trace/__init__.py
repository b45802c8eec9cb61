"""The memory trace: the memory of a step at each moment, recorded, summarised and drawn.

It makes no decisions about placement.
"""

from __future__ import annotations

from shardwise.core.memory.trace.picture import draw, draw_tiers, dump_memory_stats, tiers_text, timeline_text
from shardwise.core.memory.trace.stats import MemStats

__all__ = ["MemStats", "draw", "draw_tiers", "dump_memory_stats", "tiers_text", "timeline_text"]
