"""The three memories that model data can be kept in."""

from __future__ import annotations

from enum import Enum

__all__ = ["Tier"]


class Tier(Enum):
    """From fast and small to slow and large. On a CPU the device is an accounted part of host memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
