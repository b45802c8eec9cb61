"""Facts about devices: memory in use, peaks, what tensors hold, and whether the host runs ahead."""

from __future__ import annotations

from shardwise.device.ahead import Later, runs_ahead
from shardwise.device.memory import MemoryFacts, live_bytes, memory_facts, reset_peak

__all__ = ["Later", "MemoryFacts", "live_bytes", "memory_facts", "reset_peak", "runs_ahead"]
