"""Into which directory each rank writes: one for all, or one on each host where hosts do not share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.contents import buffer_digests
from shardwise.checkpoint.directory import CheckpointRoot
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.hosts import Hosts, place_of
from shardwise.checkpoint.owners import Writer, this_process
from shardwise.checkpoint.run import Run
from shardwise.checkpoint.write import agree, saves_in

__all__ = ["Folder", "Folders"]


@dataclass(frozen=True)
class Folder:
    """Where one save goes, as one rank has it.

    Attributes:
        owner: what makes this rank's directory visible, on the one rank that does; elsewhere ``None``.
        hidden: what this rank writes into.
        serial: the save's number.
        digests: rank 0's buffers'.
        hosts: names of those that have a directory of their own; none where all share one.
        of: by rank, which of ``hosts`` it writes on.
    """

    owner: CheckpointRoot | None
    hidden: str
    serial: int
    digests: dict[str, int]
    hosts: tuple[str, ...]
    of: tuple[int, ...]


class Folders:
    """Of one save on one rank.

    Args:
        run: what is saved.
        hosts: its hosts.
        make: gives what changes the directory of checkpoints.
        root: where checkpoints are saved.
        tag: of this one.
    """

    def __init__(self, run: Run, hosts: Hosts, make: Callable[[], CheckpointRoot], root: str, tag: str) -> None:
        self._run, self._hosts, self._make = run, hosts, make
        self._root, self._tag = root, tag
        self._owner: CheckpointRoot | None = None
        self._hidden = ""

    def prepare(self, apart: bool | None) -> Folder:
        """Make what this save is written into. Collective.

        Args:
            apart: whether hosts may have directories of their own; ``None``: they may.

        Raises:
            ValueError: on every rank: another tag on another rank, or another root on one of the same host; nothing was
                made.
            CheckpointError, ValueError: on every rank; nothing is left.
        """
        try:
            return self._prepare(apart)
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.discard(self._hidden)

    def _agree(self, action: Callable[[], Any], what: str = "") -> list[Any]:
        what = what or f"prepare checkpoint {self._tag!r} in {self._root}"
        return agree(self._run.gather, self._run.rank, what, action)[1]

    def _begin(self) -> str:
        """This rank makes a directory. Returns its name."""
        owner = self._make()
        self._hidden = owner.begin(self._tag)
        self._owner = owner
        return os.path.basename(self._hidden)

    def _ready(self) -> int:
        if self._owner is None:
            return 0
        serial = self._owner.ready(self._tag, self._hidden)
        self._owner.look(self._tag, serial, this_process())
        return serial

    def _prepare(self, apart: bool | None) -> Folder:
        run, several = self._run, len(self._hosts.names) > 1
        # Told first, and compared in the next agreement: that is one of all parts of the model.
        told = self._agree(lambda: [self._tag, *place_of(self._root)])

        def begin() -> list[Any]:
            _check_alike(told)
            digests = buffer_digests(run.held())
            if run.rank != 0:
                return []
            return [self._begin(), 0 if several else self._ready(), digests, this_process().fields()]

        name, serial, digests, fields = self._agree(begin, f"prepare checkpoint {told[0][0]!r} in {told[0][2]}")[0]
        self._hidden = os.path.join(self._root, name)
        seen = self._agree(lambda: os.path.isdir(self._hidden)) if several else [True]
        if several and all(seen):
            serial = self._agree(self._ready)[0]
        if all(seen):
            return Folder(self._owner, self._hidden, serial, digests, (), ())
        if apart is False:
            self._refuse(seen)
        names, of = self._meet(seen)
        what = f"look for earlier checkpoints in {self._root}"
        shown = saves_in(run.gather, run.rank, self._owner, names, what)
        serial = max((each.serial for each in shown), default=0) + sum(bool(each.damage) for each in shown) + 1

        def ready() -> None:
            if self._owner is not None:
                self._owner.ready(self._tag, self._hidden, shown)
                self._owner.look(self._tag, serial, Writer(*fields))

        self._agree(ready)
        return Folder(self._owner, self._hidden, serial, digests, names, of)

    def _refuse(self, seen: Sequence[bool]) -> None:
        rank = seen.index(False)
        name = self._hosts.names[self._hosts.of[rank]]
        raise CheckpointError(
            f"rank {rank} could not write its part of checkpoint {self._tag!r}: rank 0 has made {self._hidden}, which "
            f"is not there on that rank's host ({name}): give a directory on storage that all hosts share, or set "
            "session.checkpoints.apart=True to have each host keep its part"
        )

    def _meet(self, seen: Sequence[bool]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Hosts that do not see what rank 0 made make one too; those that see one directory write into that of the
        lowest rank. Returns the names of hosts with a directory, and by rank which of them it is."""
        run, hosts = self._run, self._hosts
        made = self._agree(lambda: self._begin() if not seen[run.rank] and hosts.leads(run.rank) else None)

        def look() -> int:
            if seen[run.rank]:
                return 0
            for rank, name in enumerate(made):
                if name is not None and os.path.isdir(os.path.join(self._root, name)):
                    return rank
            raise CheckpointError(f"none of {made} is in {self._root} on {hosts.names[hosts.of[run.rank]]}")

        owners = self._agree(look)
        if owners[run.rank] != run.rank:
            self._discard()
            self._hidden = os.path.join(self._root, made[owners[run.rank]] or os.path.basename(self._hidden))
        folders = sorted(set(owners))
        names = tuple(hosts.names[hosts.of[rank]] for rank in folders)
        return names, tuple(folders.index(rank) for rank in owners)


def _check_alike(told: Sequence[Sequence[str]]) -> None:
    """Every rank's tag, file systems and root, by rank; hosts may keep their parts in different places.

    Raises:
        ValueError: ranks save under different tags, or in different directories of one host.
    """
    first: dict[str, int] = {}
    for rank, (tag, host, root) in enumerate(told):
        peer = first.setdefault(host, rank)
        for name, own, other, of in (("tag", tag, told[0][0], 0), ("root", root, told[peer][2], peer)):
            if own != other:
                raise ValueError(
                    f"{name}={own!r} on rank {rank}, and {other!r} on rank {of}: give the same on every rank (of a "
                    "time stamp rank 0's, by torch.distributed.broadcast_object_list)"
                )
