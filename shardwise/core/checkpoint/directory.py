"""The directory that holds a run's checkpoints: which are there, and how one is added, replaced and removed.

Whatever begins with a dot is not a checkpoint: see :mod:`shardwise.core.checkpoint.atomic`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from shardwise.core.checkpoint.atomic import DISK, HIDDEN, AtomicDirectory, hidden_name, settle_leftovers
from shardwise.core.checkpoint.format import MANIFEST, Head, has_pieces, is_file_name, read_files, read_head
from shardwise.core.checkpoint.source import CheckpointDamage

__all__ = ["LATEST", "CheckpointRoot", "check_tag", "scan"]

LATEST = "latest"


@dataclass(frozen=True)
class Found:
    """A checkpoint; ``head`` is ``None`` (and ``damage`` says why) where its manifest is damaged or gone."""

    tag: str
    path: str
    head: Head | None
    damage: str = ""


def check_tag(tag: str) -> str:
    """Raises ValueError for a name that cannot be a directory's or means something else."""
    plain = isinstance(tag, str) and tag and not tag.startswith(".") and "/" not in tag and "\0" not in tag
    if not plain or tag in (LATEST, f"{LATEST}.partial", "auto"):
        raise ValueError(
            f"tag {tag!r}: give a plain file name without '/', not starting with '.', not 'latest' or 'auto'"
        )
    return tag


def scan(root: str) -> list[Found]:
    """The checkpoints in ``root``, newest first. Reads the manifests only.

    Those whose manifest is damaged come before all others: each of them may be the newest. Of two with one number the
    one that is not where it was saved comes first: a copy of the other, or its manifest is not its own.
    """
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    places = {n: n for n in names if not n.startswith(".")}
    for name in names:  # a kill between two renames: the one that stepped aside is still the checkpoint
        match = HIDDEN.fullmatch(name)
        if match and match["kind"] == "replaced":
            places.setdefault(match["name"], name)
    found = []
    for tag, name in places.items():
        path = os.path.join(root, name)
        if not _is_ours(path):
            continue
        try:
            found.append(Found(tag, path, read_head(path)))
        except CheckpointDamage as error:
            found.append(Found(tag, path, None, str(error)))
        except FileNotFoundError:
            continue  # another process removed it meanwhile
    return sorted(found, key=_age, reverse=True)


def _age(found: Found) -> tuple[bool, int, bool]:
    return (True, 0, False) if found.head is None else (False, found.head.serial, found.head.tag != found.tag)


def _is_ours(path: str) -> bool:
    """Whether a checkpoint, or what is left of one, is at ``path``."""
    return os.path.isdir(path) and (os.path.exists(os.path.join(path, MANIFEST)) or has_pieces(path))


class CheckpointRoot:
    """Changes one directory of checkpoints; only one process of a run (rank 0) does.

    Args:
        path: made where it is missing.
        files: the file system.
        latest: whether a file ``latest`` names the newest checkpoint.
        damaged: real paths of checkpoints that a load found damaged; those that are replaced are taken out.
    """

    def __init__(self, path: str, files: Any = DISK, latest: bool = True, damaged: set[str] | None = None) -> None:
        self.path, self._files, self._latest = path, files, latest
        self._damaged = set() if damaged is None else damaged
        self._directory: AtomicDirectory | None = None

    @property
    def hidden(self) -> str:
        """What :meth:`prepare` made."""
        if self._directory is None:
            raise RuntimeError(f"nothing is being written into {self.path}; report this")
        return self._directory.hidden

    def prepare(self, tag: str) -> int:
        """Finish or undo what killed processes left, and make a fresh :attr:`hidden` directory for ``tag``.

        Returns:
            The serial number of the save.

        Raises:
            OSError: it cannot be made.
            ValueError: something that is not a checkpoint has that name, or somebody else is saving there now.
        """
        final = os.path.join(self.path, check_tag(tag))
        os.makedirs(self.path, exist_ok=True)
        busy = settle_leftovers(self.path, is_file_name, self._files, last=MANIFEST)
        if busy:
            raise ValueError(
                f"{busy[0]} is being written by another process, or for another model of this one: give each job and "
                "each model a directory of its own, or wait for its save"
            )
        if os.path.lexists(final) and not _is_ours(final):
            raise ValueError(f"{final} exists and is not a checkpoint; choose another tag, or move it away")
        if os.path.isdir(os.path.join(final, MANIFEST)):
            raise ValueError(f"{os.path.join(final, MANIFEST)} is a folder where the checkpoint has a file: rename it")
        there = scan(self.path)
        serials = [each.head.serial for each in there if each.head is not None]
        unknown = len(there) - len(serials)  # a manifest that cannot be read today may be tomorrow
        self._directory = AtomicDirectory(final, is_file_name, self._files)
        return max(serials, default=0) + unknown + 1

    def commit(self, manifest: bytes) -> None:
        """Write the manifest and show the directory: all else that belongs to it is on the disk.

        Raises:
            OSError: nothing is visible; call :meth:`discard`.
            CheckpointError: the same; a file of another origin can be neither linked nor copied.
        """
        directory, hidden = self._directory, self.hidden
        if directory is None:
            return
        directory.take_along()
        self._files.write_file(os.path.join(hidden, MANIFEST), manifest)
        self._files.sync_directory(hidden)
        directory.commit()
        self._damaged.discard(os.path.realpath(directory.path))

    def finish(self) -> None:
        """Remove what the last commit replaced.

        Raises:
            CheckpointError: something in it that is not ours could not be moved over; it is still there.
        """
        if self._directory is not None:
            self._directory.finish()

    def discard(self) -> None:
        """Remove what :meth:`prepare` made, if it made anything and :meth:`commit` did not show it."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.discard()

    def point_latest(self, tag: str) -> None:
        """``latest`` names ``tag``: for people and scripts; what is newest is found by :func:`scan`."""
        if not self._latest:
            return
        partial = os.path.join(self.path, f".{LATEST}.partial")
        self._files.write_file(partial, f"{tag}\n".encode())
        self._files.rename(partial, os.path.join(self.path, LATEST))
        self._files.sync_directory(self.path)

    def purge(self, keep: int) -> None:
        """Remove what is older than the ``keep`` newest whole checkpoints, each by one rename before it is deleted.

        Whole are those whose files are there and as long as they were written. What is in them is not read, but those
        that a load found damaged do not count either.
        """
        removed: list[str] = []
        whole = 0
        for each in scan(self.path):
            if each.head is None:  # it may be the newest of all: somebody should look at it
                continue
            if whole < keep:
                whole += self._is_whole(each)
                continue
            removed.append(hidden_name(os.path.join(self.path, each.tag), "purged"))
            self._files.rename(each.path, removed[-1])
        if removed:
            self._files.sync_directory(self.path)
        for gone in removed:
            self._files.remove_tree(gone)

    def _is_whole(self, found: Found) -> bool:
        if os.path.realpath(found.path) in self._damaged:
            return False
        try:
            _, facts = read_files(found.path)
            return all(os.stat(os.path.join(found.path, fact.name)).st_size == fact.nbytes for fact in facts)
        except (CheckpointDamage, FileNotFoundError, NotADirectoryError):
            return False
