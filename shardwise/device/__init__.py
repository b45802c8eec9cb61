"""Facts about devices: memory in use, peaks, and what tensors hold."""

from __future__ import annotations

from shardwise.device.memory import MemoryFacts, live_bytes, memory_facts, reset_peak

__all__ = ["MemoryFacts", "live_bytes", "memory_facts", "reset_peak"]
