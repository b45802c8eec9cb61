"""A GPU that is not there: its work is done on the CPU, as late as its streams and events allow."""

from __future__ import annotations

from shardwise.testing.late.collectives import late_collectives
from shardwise.testing.late.device import LateDevice, LateError, late_device, long_ago
from shardwise.testing.late.streams import Race

__all__ = ["LateDevice", "LateError", "Race", "late_collectives", "late_device", "long_ago"]
