"""The three tiers of memory for model data."""

from __future__ import annotations

from enum import Enum

__all__ = ["Tier"]


class Tier(Enum):
    """A tier of memory, from fast and small to slow and large. On a CPU, the device is an accounted part of host
    memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
