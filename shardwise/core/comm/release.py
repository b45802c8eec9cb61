"""Release of communicators: on request, when their last user is garbage-collected, and at exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from shardwise.core.base.torch_internals import abort_group, group_is_known

WORKER = "pt_gloo_runloop"
"""The name of torch's threads that run gloo's collectives."""
MOST_S = 5.0
"""Seconds after which a process ends even if a worker never sleeps."""
LOOK_S = 4 * sys.getswitchinterval()
"""Seconds between two checks."""
UNKNOWN_S = 0.05
"""Seconds to wait if the system does not report the states of threads."""
TASKS = Path("/proc/self/task")


# [Note: What is given back, and when]
# close() releases at once; otherwise the garbage collector releases when the last user is gone. Each rank collects
# garbage at its own time, so nothing may wait for peers then: a communicator is dropped or aborted, not finished, and
# in shared memory one word is set. At process exit, nothing is released. A forked child has copies of all these objects
# and owns none of them: process ids are compared before anything is released.
def let_go_with(owner: object, process_groups: list[dist.ProcessGroup]) -> None:
    """Release ``process_groups`` when ``owner`` is garbage-collected, unless :func:`destroy` was called before.

    Nothing is communicated, since every rank collects garbage at its own time. Not at process exit.
    """
    weakref.finalize(owner, _abandon, process_groups, os.getpid()).atexit = False


def leave_with(owner: object, words: memoryview, at: int, present: int, gone: int) -> Callable[[], object]:
    """Set ``words[at]`` from ``present`` to ``gone`` once ``owner`` is collected, or the returned function is called.

    Peers see it and need not wait for their timeout.
    """

    pid = os.getpid()

    def leave() -> None:
        if words[at] == present and os.getpid() == pid:  # a forked child is not a member
            words[at] = gone

    finalizer = weakref.finalize(owner, leave)
    finalizer.atexit = False
    return finalizer


def destroy(process_groups: list[dist.ProcessGroup]) -> None:
    """Destroy all process groups that torch still knows, and empty the list."""
    while process_groups:
        group = process_groups.pop()
        if group_is_known(group):
            dist.destroy_process_group(group)


def _abandon(process_groups: list[dist.ProcessGroup], pid: int) -> None:
    while process_groups and os.getpid() == pid:  # a forked child does not own its parent's connections
        group = process_groups.pop()
        if not group_is_known(group):
            continue
        with contextlib.suppress(RuntimeError):  # a peer may be gone already
            if "gloo" in str(dist.get_backend(group)):
                dist.destroy_process_group(group)
            else:  # destroying NCCL may wait for peers; aborting does not
                abort_group(group)


# [Note: Workers that are late]
# For its caller, a collective of gloo ends when the values are there. For the worker thread that ran it, it ends a
# moment later, when the thread drops the tensors. That takes the GIL, and a thread that requests it once Python has
# begun to finalize is ended in a way that C++ does not allow: the process aborts after all its work is done. A program
# that ends right after `dist.all_reduce(loss)` does that occasionally (one in eight on a busy machine, also without
# this package). Python therefore finalizes only after all workers have gone to sleep. A worker that sleeps from before
# this thread released the GIL until it has it again waits for its next collective or for a peer; a worker that waits
# for the GIL does not sleep that long, since it wakes up after each switch interval.
def resting() -> dict[str, str] | None:
    """Return how often each of gloo's workers has gone to sleep, by thread; ``None`` while one is awake."""
    sleeps = {}
    for task in TASKS.iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            if (task / "comm").read_text().strip() == WORKER:
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                if status["State"].split()[0] != "S":
                    return None
                sleeps[task.name] = status["voluntary_ctxt_switches"].strip()
    return sleeps


@atexit.register
def wait_for_idle_workers() -> None:
    """Wait until gloo's workers have dropped the tensors of finished collectives."""
    if not TASKS.is_dir():
        time.sleep(UNKNOWN_S)
        return
    last, before = time.monotonic() + MOST_S, resting()
    while before != {} and time.monotonic() < last:
        time.sleep(LOOK_S)  # releases Python's lock
        now = resting()
        if now is not None and now == before:
            return
        before = now
