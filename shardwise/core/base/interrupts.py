"""Hold back Ctrl-C while the state of a run changes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Guard:
    """The handler of SIGINT while a block runs."""

    def __init__(self) -> None:
        self.active = False
        self._pending = False
        self._what = ""
        self._program: Callable[[int, FrameType | None], Any] = signal.default_int_handler

    def begin(self, what: str, program: Callable[[int, FrameType | None], Any]) -> None:
        """Replace the handler of the program."""
        self._pending, self._what, self._program = False, what, program
        signal.signal(signal.SIGINT, self.handle)
        self.active = True

    def end(self) -> None:
        """Restore the handler of the program, and call it if Ctrl-C came meanwhile."""
        try:
            signal.signal(signal.SIGINT, self._program)
        finally:
            if signal.getsignal(signal.SIGINT) == self.handle:  # a second Ctrl-C was raised there
                signal.signal(signal.SIGINT, self._program)
            self.active = False
        if self._pending:
            self._program(signal.SIGINT, None)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first Ctrl-C, and hand the second to the program."""
        if self._pending:
            self._pending = False
            self._program(number, frame)  # mostly raises KeyboardInterrupt
            return
        self._pending = True
        if sys.stderr.isatty():
            print(f"Ctrl-C: {self._what} ends first; press it again to stop at once", file=sys.stderr, flush=True)


_GUARD = _Guard()


# [Note: Ctrl-C]
# Python raises KeyboardInterrupt between any two operations of the main thread. step(), builds, loads and saves cannot
# continue from an arbitrary point, so they are completed first. A second Ctrl-C is raised immediately: the interrupted
# operation is marked as incomplete, and a checkpoint has to be loaded before the run continues. In forward and backward
# passes, Ctrl-C is raised immediately as well: zero_grad() drops the pass.
@contextmanager
def deferred_interrupts(what: str) -> Iterator[None]:
    """Delay Ctrl-C until the block ends. A second Ctrl-C is raised at once.

    Blocks may be nested: only the outermost has an effect. The block changes nothing outside the main thread, or if the
    program ignores SIGINT or leaves it to the system.

    Args:
        what: the action of the block, for the message on a terminal.
    """
    outer = _GUARD.active or threading.current_thread() is not threading.main_thread()
    program = None if outer else signal.getsignal(signal.SIGINT)
    if not callable(program) or program == _GUARD.handle:
        yield
        return
    try:
        _GUARD.begin(what, program)  # inside: signal.signal raises what is pending
        yield
    finally:
        _GUARD.end()
