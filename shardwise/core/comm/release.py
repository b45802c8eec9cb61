"""Communicators go with what uses them: destroyed on request, or when no user is left, or at the end."""

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

__all__ = ["destroy", "leave_with", "let_go_with"]

WORKER = "pt_gloo_runloop"
"""What torch calls the threads that run gloo's collectives."""
MOST_S = 5.0
"""Seconds after which a process ends also if a worker never rests."""
LOOK_S = 4 * sys.getswitchinterval()
"""Seconds between two looks at them."""
UNKNOWN_S = 0.05
"""Seconds for workers to rest, where the system does not tell what its threads do."""
TASKS = Path("/proc/self/task")


# [Note: What is given back, and when]
# close() gives back at once; otherwise the garbage collector does, when the last user is gone. Then nothing may be said
# to the peers in a way that waits: each rank collects when it likes. So a communicator is dropped or aborted, not
# finished, and in shared memory one word is set. At the end of the process nothing is done, since it takes all along. A
# forked child has copies of all of this and owns none: process numbers are compared before anything is given back.
def let_go_with(owner: object, process_groups: list[dist.ProcessGroup]) -> None:
    """Whatever is in ``process_groups`` when ``owner`` is collected is given back then; :func:`destroy` may come first.

    Nothing is communicated, since every rank collects garbage when it likes; not at the end of the process, which takes
    them along anyway.
    """
    weakref.finalize(owner, _abandon, process_groups, os.getpid()).atexit = False


def leave_with(owner: object, words: memoryview, at: int, present: int, gone: int) -> Callable[[], object]:
    """Once, when ``owner`` is collected or what is returned is called: ``words[at]`` becomes ``gone`` if it is
    ``present``, so that peers who see it do not wait until their time is over."""

    pid = os.getpid()

    def leave() -> None:
        if words[at] == present and os.getpid() == pid:  # a forked child is no member
            words[at] = gone

    finalizer = weakref.finalize(owner, leave)
    finalizer.atexit = False
    return finalizer


def destroy(process_groups: list[dist.ProcessGroup]) -> None:
    """Destroy all, and empty the list. Those that torch knows no more are left alone."""
    while process_groups:
        group = process_groups.pop()
        if group_is_known(group):
            dist.destroy_process_group(group)


def _abandon(process_groups: list[dist.ProcessGroup], pid: int) -> None:
    while process_groups and os.getpid() == pid:  # connections of a parent are the parent's
        group = process_groups.pop()
        if not group_is_known(group):
            continue
        with contextlib.suppress(RuntimeError):  # a peer that is gone is no news here
            if "gloo" in str(dist.get_backend(group)):
                dist.destroy_process_group(group)
            else:  # NCCL may wait for the peers when it is asked to finish, not when it is told to stop
                abort_group(group)


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
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == WORKER:
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                if status["State"].split()[0] != "S":
                    return None
                found[task.name] = status["voluntary_ctxt_switches"].strip()
    return found


@atexit.register
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
