"""Facts about devices, and streams: memory in use, peaks, what tensors hold, and which GPU work is given to."""

from __future__ import annotations

from shardwise.device.accelerator import Accelerator
from shardwise.device.ahead import Later, runs_ahead
from shardwise.device.gpus import gpu_identity, gpus_of_host, visible_gpus
from shardwise.device.memory import (
    MemoryFacts,
    allocator_bytes,
    live_bytes,
    memory_facts,
    reset_allocator_peak,
    reset_peak,
)
from shardwise.device.streams import (
    RandomState,
    SideCopy,
    behind_current,
    default_generator,
    give_back,
    make_current,
    numbered,
    on_device,
    on_stream,
    page_lock,
    random_state,
    record_event,
    set_random_state,
    side_stream,
    synchronize,
    total_bytes,
    wait_event,
)

__all__ = [
    "Accelerator",
    "Later",
    "MemoryFacts",
    "RandomState",
    "SideCopy",
    "allocator_bytes",
    "behind_current",
    "default_generator",
    "give_back",
    "gpu_identity",
    "gpus_of_host",
    "live_bytes",
    "make_current",
    "memory_facts",
    "numbered",
    "on_device",
    "on_stream",
    "page_lock",
    "random_state",
    "record_event",
    "reset_allocator_peak",
    "reset_peak",
    "runs_ahead",
    "set_random_state",
    "side_stream",
    "synchronize",
    "total_bytes",
    "visible_gpus",
    "wait_event",
]
