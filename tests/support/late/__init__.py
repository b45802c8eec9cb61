"""A simulated GPU: its work runs on the CPU, as late as its streams and events allow."""

from tests.support.late.collectives import late_collectives
from tests.support.late.device import LateDevice, LateError, late_device, long_ago
from tests.support.late.streams import Race

__all__ = ["LateDevice", "LateError", "Race", "late_collectives", "late_device", "long_ago"]
