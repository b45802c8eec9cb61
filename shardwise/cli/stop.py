"""Ctrl-C and SIGTERM as a request: the step under way is finished first."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Remembers the first SIGINT or SIGTERM. ``signal`` is its number, 0 while none came."""

    def __init__(self) -> None:
        self.signal = 0

    def install(self) -> None:
        """Take over both signals in this process; only the main thread may call it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number
