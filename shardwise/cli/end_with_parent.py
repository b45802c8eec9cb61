"""``python end_with_parent.py PID COMMAND ...``: run a command that ends when process PID, its parent, ends.

A killed launcher cannot end its ranks. On Linux the system does it (the parent-death signal, which an exec keeps). On
other systems this process stays as the command's parent and checks every second. It runs as a file in a separate
interpreter, so the command's interpreter is not affected.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

LAUNCHER_GONE = 128 + signal.SIGKILL
_SET_PARENT_DEATH_SIGNAL = 1
_LOOK_S = 1.0


def command_that_follows(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` (program first) and ends with this process.

    Start it in the main thread: the system sends the signal when the starting thread ends.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with(parent: int) -> bool:
    """Make the system kill this process when its parent ``parent`` ends; return False if the system cannot do that."""
    if sys.platform != "linux":
        return False
    try:
        failed: int = ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    except (AttributeError, OSError):
        return False
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(LAUNCHER_GONE)
    return failed == 0


def _stay(parent: int, command: Sequence[str]) -> int:
    # ignored here: the whole process group gets these signals, and the command handles them
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                process.kill()


def main(arguments: Sequence[str]) -> int:
    """Run ``PID COMMAND ...``. It returns only if this process has to stay."""
    parent, command = int(arguments[0]), list(arguments[1:])
    if end_with(parent):
        os.execvp(command[0], command)
    status = _stay(parent, command)
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL cannot be handled
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
