"""How many files this process may have open: each connection of a communicator over gloo is one, on every rank."""

from __future__ import annotations

import os
import resource
import threading

from shardwise.core.base.warnings import warn_user

__all__ = ["make_room"]

SPARE = 256
"""For all that opens files beside communicators: data loaders, checkpoints, libraries."""
GROUPS = 3
"""Communicators over all ranks that a run has at the most, as a rule: agreement, saves, and the program's own."""
_told = threading.Event()


def make_room(ranks: int) -> None:
    """Before a communicator of ``ranks`` is made over gloo, which connects each of them with each: the limit of open
    files (``ulimit -n``) goes up to what that needs, as far as the hard limit lets it.

    Warns:
        UserWarning: the hard limit is too low, once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there, endless = _open_files(), resource.RLIM_INFINITY
    needed = there + ranks + SPARE
    if soft == endless or soft >= needed:
        return
    most = needed if hard == endless else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # the system has a lower one of its own
        most = soft
    if most < needed and not _told.is_set():
        _told.set()
        warn_user(
            f"a communicator of {ranks} ranks takes as many open files of each of them; {there} are open, and no more "
            f"than {most} may be (ulimit -Hn), so that it may fail with 'Too many open files': allow "
            f"{there + GROUPS * ranks + SPARE} on every host (ulimit -n, LimitNOFILE= of a service, --ulimit nofile= "
            "of a container), or divide the ranks into smaller groups"
        )


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # not everywhere may a process list them
        return 0
