"""What a step holds at which moment: recorded, summed up, drawn.

Nothing here decides what is moved.
"""

from __future__ import annotations

from shardwise.trace.dump import dump_memory_stats
from shardwise.trace.picture import draw, timeline_text
from shardwise.trace.stats import MemStats
from shardwise.trace.tiers_picture import draw_tiers, tiers_text
from shardwise.trace.tracing import trace_memory

__all__ = ["MemStats", "draw", "draw_tiers", "dump_memory_stats", "tiers_text", "timeline_text", "trace_memory"]
