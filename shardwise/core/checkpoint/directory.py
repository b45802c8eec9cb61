"""The root directory of a run's checkpoints: find, add, replace and remove checkpoints.

Names that begin with a dot are not checkpoints: see :mod:`shardwise.core.checkpoint.atomic`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from shardwise.core.checkpoint.atomic import DISK, HIDDEN, AtomicDirectory, hidden_name, settle_leftovers
from shardwise.core.checkpoint.native_format import MANIFEST, Head, has_pieces, is_file_name, read_files, read_head
from shardwise.core.checkpoint.source import CheckpointDamage

LATEST = "latest"


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint; ``head`` is ``None``, and ``damage`` the reason, if its manifest is damaged or missing."""

    tag: str
    path: str
    head: Head | None
    damage: str = ""


def check_tag(tag: str) -> str:
    """Return ``tag``, or raise ValueError if it cannot name a directory or is reserved."""
    plain = isinstance(tag, str) and tag and not tag.startswith(".") and "/" not in tag and "\0" not in tag
    if not plain or tag in (LATEST, f"{LATEST}.partial", "auto"):
        raise ValueError(
            f"tag={tag!r} is not a valid name; use a plain file name without '/' that does not start with '.' and is "
            "not 'latest' or 'auto'"
        )
    return tag


def scan(root: str) -> list[CheckpointEntry]:
    """Return the checkpoints in ``root``, newest first. Reads only the manifests.

    Those with a damaged manifest are first, because each may be the newest. Of two with the same serial number the one
    that is not where it was saved is first: it is a copy, or has the manifest of another.
    """
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    places = {n: n for n in names if not n.startswith(".")}
    for name in names:  # after a kill between two renames, the directory that was moved away is still the checkpoint
        match = HIDDEN.fullmatch(name)
        if match and match["kind"] == "replaced":
            places.setdefault(match["name"], name)
    entries = []
    for tag, name in places.items():
        path = os.path.join(root, name)
        if not _is_ours(path):
            continue
        try:
            entries.append(CheckpointEntry(tag, path, read_head(path)))
        except CheckpointDamage as error:
            entries.append(CheckpointEntry(tag, path, None, error.problem))
        except FileNotFoundError:
            continue  # another process removed it meanwhile
    return sorted(entries, key=_age, reverse=True)


def _age(entry: CheckpointEntry) -> tuple[bool, int, bool]:
    return (True, 0, False) if entry.head is None else (False, entry.head.serial, entry.head.tag != entry.tag)


def _is_ours(path: str) -> bool:
    """Return True if ``path`` is a checkpoint or a part of a checkpoint."""
    return os.path.isdir(path) and (os.path.exists(os.path.join(path, MANIFEST)) or has_pieces(path))


class CheckpointRoot:
    """A root directory of checkpoints, which only rank 0 of a run changes.

    Args:
        path: created if it does not exist.
        files: the file system.
        latest: whether to write a file ``latest`` with the name of the newest checkpoint.
        damaged: real paths of checkpoints that a load found damaged; a replaced one is removed from the set.
    """

    def __init__(self, path: str, files: Any = DISK, latest: bool = True, damaged: set[str] | None = None) -> None:
        self.path, self._files, self._latest = path, files, latest
        self._damaged = set() if damaged is None else damaged
        self._directory: AtomicDirectory | None = None

    @property
    def hidden(self) -> str:
        """Return the directory that :meth:`prepare` created."""
        if self._directory is None:
            raise RuntimeError(f"nothing is being written into {self.path}; report this")
        return self._directory.hidden

    def prepare(self, tag: str) -> int:
        """Clean up after killed processes, and create a :attr:`hidden` directory for ``tag``.

        Returns:
            The serial number of the save.

        Raises:
            OSError: the directory cannot be created.
            ValueError: something else has that name, or another process is saving there now.
        """
        final = os.path.join(self.path, check_tag(tag))
        os.makedirs(self.path, exist_ok=True)
        busy = settle_leftovers(self.path, is_file_name, self._files, last=MANIFEST)
        if busy:
            raise ValueError(
                f"{busy[0]} is being written by another process, or for another model of this process; give each job "
                "and each model its own directory, or wait until that save ends"
            )
        if os.path.lexists(final) and not _is_ours(final):
            raise ValueError(f"{final} exists and is not a checkpoint; choose another tag, or move it away")
        if os.path.isdir(os.path.join(final, MANIFEST)):
            raise ValueError(f"{final}/{MANIFEST} is a folder, and the checkpoint needs a file of that name; rename it")
        there = scan(self.path)
        serials = [each.head.serial for each in there if each.head is not None]
        unknown = len(there) - len(serials)  # a manifest that cannot be read now may be readable later
        self._directory = AtomicDirectory(final, is_file_name, self._files)
        return max(serials, default=0) + unknown + 1

    def commit(self, manifest: bytes) -> None:
        """Write the manifest and make the directory visible; everything else must be on the disk.

        Raises:
            OSError: nothing is visible; call :meth:`discard`.
            CheckpointError: a foreign file can be neither linked nor copied.
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
        """Remove the directory that the last commit replaced.

        Raises:
            CheckpointError: a foreign file in it could not be moved; it is still there.
        """
        if self._directory is not None:
            self._directory.finish()

    def discard(self) -> None:
        """Remove the directory of :meth:`prepare` if it was not committed."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.discard()

    def point_latest(self, tag: str) -> None:
        """Write ``tag`` into ``latest``, for people and scripts; :func:`scan` does not read it."""
        if not self._latest:
            return
        partial = os.path.join(self.path, f".{LATEST}.partial")
        self._files.write_file(partial, f"{tag}\n".encode())
        self._files.rename(partial, os.path.join(self.path, LATEST))
        self._files.sync_directory(self.path)

    def purge(self, keep: int) -> None:
        """Remove checkpoints older than the ``keep`` newest complete ones; each is renamed before it is deleted.

        A checkpoint is complete if its files have their sizes and no load found it damaged; contents are not read.
        """
        removed: list[str] = []
        complete = 0
        for each in scan(self.path):
            if each.head is None:  # it may be the newest: keep it for inspection
                continue
            if complete < keep:
                complete += self._is_complete(each)
                continue
            removed.append(hidden_name(os.path.join(self.path, each.tag), "purged"))
            self._files.rename(each.path, removed[-1])
        if removed:
            self._files.sync_directory(self.path)
        for gone in removed:
            self._files.remove_tree(gone)

    def _is_complete(self, entry: CheckpointEntry) -> bool:
        if os.path.realpath(entry.path) in self._damaged:
            return False
        try:
            _, infos = read_files(entry.path)
            return all(os.stat(os.path.join(entry.path, info.name)).st_size == info.nbytes for info in infos)
        except (CheckpointDamage, FileNotFoundError, NotADirectoryError):
            return False
