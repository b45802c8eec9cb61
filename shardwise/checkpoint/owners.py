"""Whose checkpoints lie in a directory: two jobs that save into one must not rotate each other's away.

Every manifest says which process wrote it. No lock and no heartbeat: those of a crashed job would stand in the way of
its restart, and network file systems do not keep them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from shardwise.comm.mapping import host_facts, is_running, start_time
from shardwise.mesh.launch import read_variable
from shardwise.remarks import warn_user

if TYPE_CHECKING:
    from shardwise.checkpoint.directory import Found

__all__ = ["Owners", "Writer", "this_process"]


@dataclass(frozen=True)
class Writer:
    """The process (rank 0) that wrote a checkpoint.

    Attributes:
        host: its name.
        machine: tells processes of one machine and one process namespace; empty where that is not known.
        pid: in that namespace.
        started: clock tick of its start, so that a pid that was given anew is not taken for it.
        job: of the launcher or the batch system; may be empty.
    """

    host: str
    machine: str
    pid: int
    started: int
    job: str

    @classmethod
    def read(cls, fields: object) -> Writer | None:
        """From a manifest; ``None`` where it has none that can be understood."""
        kinds = (str, str, int, int, str)
        if not isinstance(fields, list) or [type(each) for each in fields] != list(kinds):
            return None
        return cls(*fields)

    def fields(self) -> list[Any]:
        """For a manifest."""
        return [self.host, self.machine, self.pid, self.started, self.job]

    def lives(self) -> bool | None:
        """Whether it still runs; ``None``: it ran elsewhere, so nobody here knows."""
        if not self.machine or self.machine != this_process().machine:
            return None
        return is_running(self.pid, self.started)

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        same = ", which is this job itself" if self.job and self.job == this_process().job else ""
        return f"process {self.pid} on {self.host}{job}{same}"


def this_process() -> Writer:
    """The one that runs this."""
    return _process(os.getpid())  # which differs in a fork


@cache
def _process(pid: int) -> Writer:
    facts = host_facts()
    machine = f"{facts['boot']}/{facts['processes']}" if facts else ""
    named = (read_variable(name) for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    job = next((name for name in named if name and name != "none"), "")
    return Writer(socket.gethostname(), machine, pid, start_time(pid), job)


class Owners:
    """What one run knows of other jobs that save where it saves.

    Another job is one whose process runs on this machine, or that has saved since this run's last save. One that ran
    elsewhere and is silent may have crashed, and this run may be its restart.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._others: dict[str, set[Writer]] = {}

    def look(self, root: str, there: Sequence[Found], tag: str, serial: int, mine: Writer) -> frozenset[Writer]:
        """The other jobs, before the save number ``serial`` of this run becomes ``tag``. Warns of each once.

        Args:
            root: a directory of checkpoints.
            there: the checkpoints in it.
            tag, serial: of the save.
            mine: this run's first process.

        Raises:
            ValueError: one of them has saved ``tag`` since this run's last save.
        """
        root = os.path.realpath(root)
        last, known = self._last.get(root), self._others.setdefault(root, set())
        found = set()
        for each in there:
            writer = None if each.head is None else each.head.writer
            if each.head is None or writer is None or writer == mine:
                continue
            lives, since = writer.lives(), last is not None and each.head.serial >= last
            if lives or (lives is None and (since or writer in known)):
                found.add(writer)
                if since and each.tag == tag:
                    raise ValueError(
                        f"{each.path} was saved by {writer} since this run last saved into {root}: both use the same "
                        "directory and the same tags; give each a directory of its own"
                    )
        for writer in found - known:
            warn_user(
                f"{writer} saves into {root} too. keep= counts and removes only what it has not saved; a tag that both "
                "use is overwritten. Give each job, and each group of ranks, a directory of its own"
            )
        known |= found
        self._last[root] = serial
        return frozenset(found)
