"""Whose checkpoints lie in a directory: two that save into one must not rotate each other's away.

Every manifest says which process wrote it; which of several models of this process, the process knows. No lock and no
heartbeat: those of a crashed job would stand in the way of its restart, and network file systems do not keep them.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import weakref
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


_SAVED: dict[str, tuple[weakref.ref[Any], int]] = {}
"""By the real path of a checkpoint that this process wrote, whose it is, and when by :data:`_clock`."""
_WRITING: dict[str, weakref.ref[Any]] = {}
"""Whose is what is being written, and may be by a thread."""
_clock = itertools.count()


class Owners:
    """What one run knows of other jobs, and other models of this process, that save where it saves.

    Another job is one whose process runs on this machine, or that has saved since this run's last save. One that ran
    elsewhere and is silent may have crashed, and this run may be its restart. Another model is one that has saved since
    this run was made, or has loaded. One that saves no more (its session was closed, it is gone, or it has only saved
    before) is one that this run follows.

    Args:
        subject: what is saved, which lives as long as its run does and may have ``closed``; ``None``: nobody knows.
    """

    def __init__(self, subject: object = None) -> None:
        self._subject = None if subject is None else weakref.ref(subject)
        self._last: dict[str, int] = {}
        self._others: dict[str, set[Writer]] = {}
        self._beside: set[str] = set()
        self._since = next(_clock)

    def go_on(self) -> None:
        """What was saved before now is this run's to go on from, and to replace."""
        self._since = next(_clock)

    def close(self) -> None:
        """This run saves no more."""
        for path, (subject, _) in list(_SAVED.items()):
            if subject == self._subject:
                _SAVED.pop(path, None)

    def look(
        self, root: str, there: Sequence[Found], tag: str, serial: int, mine: Writer, tell: bool = True
    ) -> frozenset[Writer]:
        """The other jobs, before the save number ``serial`` of this run becomes ``tag``. Warns of each once.

        Args:
            root: a directory of checkpoints.
            there: the checkpoints in it.
            tag, serial: of the save.
            mine: this run's first process.
            tell: warn of other models of this process, too, whose tags are others.

        Raises:
            ValueError: one of them has saved ``tag`` since this run's last save, or another model of this process has.
        """
        root = os.path.realpath(root)
        _forget(root)
        self._look_beside(root, [each.tag for each in there if each.head and each.head.writer == mine], tag, tell)
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
        if self._subject is not None:
            _WRITING[os.path.join(root, tag)] = self._subject
        return frozenset(found)

    def _look_beside(self, root: str, there: Sequence[str], tag: str, tell: bool) -> None:
        if any(self._other(os.path.join(root, each)) is not None for each in (*there, tag)):
            gc.collect()  # a session that a program has let go of may be there still
        path = os.path.join(root, tag)
        other = self._unless_own(_WRITING.get(path))
        if other is None and tag in there:
            other = self._other(path)
        if other is not None:
            raise ValueError(
                f"{path} was saved by another model of this process ({_name(other)}), which is in use: two that save "
                "into one directory under the same tags replace each other's. Give each a directory of its own, such "
                f"as {os.path.join(root, 'generator')} and {os.path.join(root, 'discriminator')}; or close() the "
                "session that this one goes on from"
            )
        others = (self._other(os.path.join(root, each)) for each in there)
        found = {_name(each) for each in others if each is not None}
        if found and tell and root not in self._beside:
            self._beside.add(root)
            warn_user(
                f"another model of this process ({', '.join(sorted(found))}) saves into {root} too. keep= counts and "
                "removes only what it has not saved, but the newest, and what latest names, may be its. Give each "
                "model a directory of its own"
            )

    def has_other(self, root: str, tag: str) -> bool:
        """Whether another model of this process, which is in use, has saved ``tag``."""
        return self._other(os.path.join(os.path.realpath(root), tag)) is not None

    def _other(self, path: str) -> Any:
        """The other model that saves beside this run, and has saved ``path``."""
        subject, when = _SAVED.get(path, (None, -1))
        return self._unless_own(subject) if when > self._since else None

    def _unless_own(self, found: weakref.ref[Any] | None) -> Any:
        """Another model than this run's that can still save."""
        other = None if found is None else found()
        own = self._subject is not None and other is self._subject()
        return None if own or getattr(other, "closed", False) is True else other

    def wrote(self, root: str, tag: str) -> None:
        """The save that :meth:`look` was for is complete."""
        if self._subject is not None:
            _SAVED[os.path.join(os.path.realpath(root), tag)] = self._subject, next(_clock)

    def ended(self, root: str, tag: str) -> None:
        """It is under way no more, complete or not."""
        path = os.path.join(os.path.realpath(root), tag)
        if self._subject is not None and _WRITING.get(path) == self._subject:
            del _WRITING[path]


def _forget(root: str) -> None:
    """What was removed or moved away is nobody's."""
    for path in list(_SAVED):  # a thread may add to it
        if os.path.dirname(path) == root and not os.path.lexists(path):
            _SAVED.pop(path, None)


def _name(subject: Any) -> str:
    return type(getattr(subject, "model", subject)).__name__
