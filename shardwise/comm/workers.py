"""At the end of the process: gloo's workers let go of what they have sent before Python takes itself down."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["let_workers_rest", "resting"]

NAME = "pt_gloo_runloop"
"""What torch calls the threads that run gloo's collectives."""
MOST_S = 5.0
"""Seconds after which a process ends also if a worker never rests."""
LOOK_S = 4 * sys.getswitchinterval()
"""Seconds between two looks at them."""
UNKNOWN_S = 0.05
"""Seconds for workers to rest, where the system does not tell what its threads do."""
TASKS = Path("/proc/self/task")


# [Note: Workers that are late]
# A collective of gloo is over for who waits for it when its values are there, and for the worker that ran it a moment
# later, when it drops the tensors. That takes Python's lock, and a thread that asks for it once Python has begun to
# finalize is ended in a way that C++ does not allow: the process aborts, after all of its work was done. A program that
# ends right after `dist.all_reduce(loss)` does that now and then (one in eight on a busy machine, without this package
# too). So before Python finalizes, all workers have gone to sleep. One that sleeps since before this thread gave the
# lock away until it came back waits for its next collective, or in one for a peer; one that waits for the lock does
# not, since it looks again after each switch interval.
def resting() -> dict[str, str] | None:
    """How often each of gloo's workers has gone to sleep, by thread; ``None`` while one does not sleep."""
    found = {}
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == NAME:
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                if status["State"].split()[0] != "S":
                    return None
                found[task.name] = status["voluntary_ctxt_switches"].strip()
    return found


def let_workers_rest() -> None:
    """Return when gloo's workers have let go of the tensors of finished collectives."""
    if not TASKS.is_dir():
        time.sleep(UNKNOWN_S)
        return
    last, before = time.monotonic() + MOST_S, resting()
    while before != {} and time.monotonic() < last:
        time.sleep(LOOK_S)  # gives Python's lock away
        now = resting()
        if now is not None and now == before:
            return
        before = now
