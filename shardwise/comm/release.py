"""Communicators go with what uses them: destroyed on request, or when no user is left, or at the end."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable

import torch.distributed as dist

from shardwise.comm.workers import let_workers_rest
from shardwise.torch_internals import abort_group, group_is_known

__all__ = ["destroy", "leave_with", "let_go_with"]


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


atexit.register(let_workers_rest)
