"""What the tests of placement share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.plan import DiskPlan, TierPlan, on_device

DISK = DiskPlan(directory="/nowhere", block_bytes=4096, queue_depth=1, threads=1, state_buffers=1, param_buffers=1)


def shares(**fields: Any) -> TierPlan:
    disk = DISK if any(fields.get(f"{kind}_disk_fraction") for kind in ("param", "state")) else None
    return replace(on_device(), disk=disk, **fields)
