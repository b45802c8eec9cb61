"""The three memories that model data may be at home in."""

from __future__ import annotations

from enum import Enum

__all__ = ["Tier"]


class Tier(Enum):
    """Fast and small first. On a CPU the device is an accounted part of the host's memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
