"""``python follow.py PID COMMAND ...``: becomes the command, which ends when process PID, its parent, does.

A launcher that is killed cannot end its ranks. On Linux the system does it (the parent-death signal, which outlives the
exec). Elsewhere this process stays, as the command's parent, and looks every second. Run as a file in a bare
interpreter: the command's own finds nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["LAUNCHER_GONE", "command_that_follows", "end_with", "main"]

LAUNCHER_GONE = 128 + signal.SIGKILL
_SET_PARENT_DEATH_SIGNAL = 1
_LOOK_S = 1.0


def command_that_follows(command: Sequence[str]) -> list[str]:
    """``command`` (its program first) as one that ends with this process. Start it in the main thread: the system
    takes the end of the thread that started it for that of the process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with(parent: int) -> bool:
    """The system kills this process when ``parent``, which started it, ends; False where it cannot do that."""
    if sys.platform != "linux":
        return False
    try:
        failed: int = ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    except (AttributeError, OSError):
        return False
    if os.getppid() != parent:  # it ended before it could be asked for
        os._exit(LAUNCHER_GONE)
    return failed == 0


def _stay(parent: int, command: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they come to the whole group, and the command answers
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                process.kill()


def main(arguments: Sequence[str]) -> int:
    """Run ``PID COMMAND ...``; returns only where this process has to stay."""
    parent, command = int(arguments[0]), list(arguments[1:])
    if end_with(parent):
        os.execvp(command[0], command)
    status = _stay(parent, command)
    if status < 0:
        with contextlib.suppress(OSError):  # nobody handles SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
