"""Names in the directory that holds a run's checkpoints: how one becomes visible, is replaced, found and removed.

Whatever begins with a dot is not a checkpoint: ``.<tag>.saving-<hex>`` is being written (or was exchanged for its
successor), ``.<tag>.replaced-<hex>`` stepped aside where the system cannot exchange names, ``.<tag>.purged-<hex>`` is
being deleted. Every one of them may be left by a killed process; the next save removes them. Files of another origin in
a checkpoint's directory belong to the tag: see :mod:`shardwise.checkpoint.foreign`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpoint.file_system import DISK
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.foreign import settle, take_along
from shardwise.checkpoint.format import MANIFEST, Head, has_pieces, is_file_name, read_files, read_head
from shardwise.checkpoint.owners import Owners, Writer, this_process
from shardwise.checkpoint.parts import DAMAGED, HIDDEN, OTHERS, Part, Version, list_parts
from shardwise.checkpoint.source import CheckpointDamage
from shardwise.disk.errors import explain

__all__ = ["LATEST", "CheckpointRoot", "Found", "check_tag", "describe", "scan"]

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
            places.setdefault(match["tag"], name)
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


def _is_own_file(path: str) -> bool:
    """Whether a save wrote the file; a folder of that name it did not."""
    return is_file_name(os.path.basename(path)) and (os.path.islink(path) or not os.path.isdir(path))


def _is_newer(part: Part, there: Part | None, shown: Sequence[Version]) -> bool:
    """Whether a hidden part is of a save that some host shows, and newer than what this host shows."""
    known = any(part.digest and each.digest == part.digest for version in shown for each in version.parts.values())
    return known and (there is None or there.serial < part.serial)


class CheckpointRoot:
    """Changes one directory of checkpoints; only one process of a run (rank 0) does.

    Args:
        root: made where it is missing.
        files: the file system.
        latest: whether a file ``latest`` names the newest checkpoint.
        damaged: real paths of checkpoints that a load found damaged; those that are replaced are taken out.
        owners: what the run has learnt of other jobs.
    """

    def __init__(
        self,
        root: str,
        files: Any = DISK,
        latest: bool = True,
        damaged: set[str] | None = None,
        owners: Owners | None = None,
    ) -> None:
        self.root, self._files, self._latest = root, files, latest
        self._damaged = set() if damaged is None else damaged
        self._owners = owners or Owners()
        self._others: frozenset[Writer] = frozenset()
        """Jobs whose checkpoints are not this run's to remove."""
        self._lock: int | None = None
        self._replaced: str | None = None
        """Where the checkpoint is now that the last commit replaced."""
        self._taken: tuple[str, str | None] | None = None
        """Where the last commit had its directory from, and where it put what was replaced."""
        self._there: list[Found] = []
        self._tag: str | None = None
        """What is being written."""

    def _hidden(self, tag: str, kind: str) -> str:
        return os.path.join(self.root, f".{tag}.{kind}-{secrets.token_hex(8)}")

    def prepare(self, tag: str) -> tuple[str, int]:
        """A fresh hidden directory for ``tag``, and the serial number of the save, where all of it is written here.

        Raises:
            OSError: it cannot be made.
            ValueError: something that is not a checkpoint has that name, or another job saves under it now.
        """
        hidden = self.begin(tag)
        try:
            serial = self.ready(tag, hidden)
            self.look(tag, serial, this_process())
        except BaseException:
            self.discard(hidden)
            raise
        return hidden, serial

    def begin(self, tag: str) -> str:
        """A fresh hidden directory for ``tag``; call :meth:`ready` before anything is in it. Raises OSError."""
        os.makedirs(self.root, exist_ok=True)
        hidden = self._hidden(check_tag(tag), "saving")
        self._files.make_directory(hidden)
        # The lock tells others that this is no leftover; the system drops it when the process ends.
        self._lock = self._files.lock_directory(hidden)
        return hidden

    def ready(self, tag: str, hidden: str, shown: Sequence[Version] = ()) -> int:
        """Finish or undo what killed processes left beside ``hidden``. Returns the serial number of the next save.

        Args:
            tag: what will be written.
            hidden: what :meth:`begin` made.
            shown: where hosts write into directories of their own, the saves that some of them shows.

        Raises:
            ValueError: something that is not a checkpoint has that name.
        """
        self.recover(shown, hidden)
        final = os.path.join(self.root, tag)
        if os.path.lexists(final) and not _is_ours(final):
            raise ValueError(f"{final} exists and is not a checkpoint; choose another tag, or move it away")
        if os.path.isdir(os.path.join(final, MANIFEST)):
            raise ValueError(f"{os.path.join(final, MANIFEST)} is a folder where the checkpoint has a file: rename it")
        self._there = scan(self.root)
        serials = [each.head.serial for each in self._there if each.head is not None]
        unknown = len(self._there) - len(serials)  # a manifest that cannot be read today may be tomorrow
        return max(serials, default=0) + unknown + 1

    def look(self, tag: str, serial: int, writer: Writer) -> None:
        """Which other jobs save here; ``writer`` is this run's first process. See :meth:`Owners.look`."""
        self._others = self._owners.look(self.root, self._there, tag, serial, writer, self._latest)
        self._tag = tag

    def recover(self, shown: Sequence[Version] = (), mine: str = "") -> None:
        """Finish or undo what a killed process left, but for what is ``mine``; see :meth:`ready`."""
        parts = {part.name: part for part in list_parts(self.root)} if shown else {}
        for name in sorted(os.listdir(self.root)):
            match = HIDDEN.fullmatch(name)
            if match is None or os.path.join(self.root, name) == mine:
                continue
            path, final = os.path.join(self.root, name), os.path.join(self.root, match["tag"])
            if match["kind"] == "replaced" and not os.path.lexists(final):
                self._files.rename(path, final)
                self._files.sync_directory(self.root)
            elif match["kind"] == "saving":
                with contextlib.suppress(OSError):
                    lock = self._files.lock_directory(path)
                    if lock is not None:
                        if name in parts and _is_newer(parts[name], parts.get(match["tag"]), shown):
                            self._show(path, match["tag"])
                        self._clear(path, final)
                        self._files.close(lock)
            elif match["kind"] == "replaced":
                self._clear(path, final)
            else:
                self._files.remove_tree(path)

    def _clear(self, hidden: str, final: str) -> None:
        """Remove a directory that is written no more, or was replaced by ``final``; files of another origin move there.

        Where no checkpoint is at ``final`` any more (somebody moved it), one that was complete keeps what is not ours.
        """
        if os.path.islink(hidden):
            self._files.remove_tree(hidden)
        elif _is_ours(final):
            settle(self._files, hidden, final, _is_own_file)
        elif os.path.exists(os.path.join(hidden, MANIFEST)):
            paths = [os.path.join(hidden, name) for name in self._files.list_directory(hidden)]
            if all(map(_is_own_file, paths)):
                self._files.remove_tree(hidden)
            else:  # the manifest says that they were in a place
                for path in paths:
                    if _is_own_file(path) and os.path.basename(path) != MANIFEST:
                        self._files.remove_tree(path)
        else:  # never in any place: it has only further links to such files
            self._files.remove_tree(hidden)

    def seal(self, hidden: str, tag: str, manifest: bytes) -> None:
        """Write the manifest: all that belongs to the checkpoint is on the disk; then call :meth:`commit`.

        Files of another origin in a checkpoint that is replaced are in its successor too.

        Raises:
            OSError: nothing is visible; call :meth:`discard`.
            CheckpointError: the same; such a file can be neither linked nor copied.
        """
        if os.path.isdir(os.path.join(self.root, tag)):
            take_along(self._files, os.path.join(self.root, tag), hidden, _is_own_file)
        self._files.write_file(os.path.join(hidden, MANIFEST), manifest)
        self._files.sync_directory(hidden)

    def commit(self, hidden: str, tag: str) -> None:
        """Give the directory its name, in one step; then call :meth:`finish`, or :meth:`take_back`.

        Raises:
            OSError: nothing is visible; call :meth:`discard`.
        """
        self._taken = None
        self._replaced = self._show(hidden, tag)
        self._taken = (hidden, self._replaced)
        self._owners.wrote(self.root, tag)
        self._unlock()
        self._damaged.discard(os.path.realpath(os.path.join(self.root, tag)))

    def take_back(self, tag: str) -> None:
        """What the last commit replaced is there again, if there was one. Raises OSError."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._take_back(taken[0], os.path.join(self.root, tag), taken[1])
            self._replaced = None
            self._files.sync_directory(self.root)

    def _show(self, hidden: str, tag: str) -> str | None:
        """Returns where that is which had the name before."""
        final = os.path.join(self.root, tag)
        old: str | None = None
        if not os.path.lexists(final):
            self._files.rename(hidden, final)
        elif self._files.exchange(hidden, final):
            old = hidden
        else:
            old = self._hidden(tag, "replaced")
            self._files.rename(final, old)
            try:
                self._files.rename(hidden, final)
            except BaseException:
                self._files.rename(old, final)
                raise
        try:
            self._files.sync_directory(self.root)
        except BaseException:
            self._take_back(hidden, final, old)
            raise
        return old

    def finish(self, tag: str) -> None:
        """Remove what the last commit replaced.

        Raises:
            CheckpointError: something in it that is not ours could not be moved over; it is still there.
        """
        old, self._replaced, self._taken = self._replaced, None, None
        if old is not None:
            self._clear(old, os.path.join(self.root, tag))

    def _take_back(self, hidden: str, final: str, old: str | None) -> None:
        """The new name may not survive a power failure: what was there before is put back."""
        if old == hidden:
            self._files.exchange(hidden, final)
            return
        self._files.rename(final, hidden)
        if old is not None:
            self._files.rename(old, final)

    def point_latest(self, tag: str) -> None:
        """``latest`` names ``tag``: for people and scripts; what is newest is found by :func:`scan`."""
        if not self._latest:
            return
        partial = os.path.join(self.root, f".{LATEST}.partial")
        self._files.write_file(partial, f"{tag}\n".encode())
        self._files.rename(partial, os.path.join(self.root, LATEST))
        self._files.sync_directory(self.root)

    def purge(self, keep: int) -> list[str]:
        """Remove what is older than the ``keep`` newest whole checkpoints, each by one rename before it is deleted.

        Whole are those whose files are there and as long as they were written. What is in them is not read, but those
        that a load found damaged do not count either. Those of other jobs, and of other models of this process, that
        save here do not count and stay. Returns the tags of what was removed.
        """
        removed: list[Part] = []
        whole = 0
        for each in scan(self.root):
            if each.head is None:  # it may be the newest of all: somebody should look at it
                continue
            if self._is_others(each):
                continue
            if whole < keep:
                whole += self._is_whole(each)
                continue
            removed.append(Part(each.tag, os.path.basename(each.path), True))
        self.remove(removed)
        return [part.tag for part in removed]

    def parts(self) -> list[Part]:
        """What is here of saves that hosts wrote into directories of their own; see :meth:`remove`."""
        others = {each.tag for each in scan(self.root) if self._is_others(each)}
        found = []
        for part in list_parts(self.root):
            damaged = os.path.realpath(os.path.join(self.root, part.name)) in self._damaged
            spared = OTHERS if part.tag in others else DAMAGED if damaged else ""
            found.append(replace(part, spared=spared))
        return found

    def _is_others(self, found: Found) -> bool:
        """Whether it is another job's, or another model's of this process."""
        writer = None if found.head is None else found.head.writer
        own = writer == this_process() and self._owners.has_other(self.root, found.tag)
        return own or (writer is not None and writer in self._others)

    def remove(self, doomed: Sequence[Part]) -> None:
        """Remove what is here of saves, each by one rename before it is deleted."""
        removed = []
        for part in doomed:
            gone = self._hidden(part.tag, "purged")
            self._files.rename(os.path.join(self.root, part.name), gone)
            removed.append(gone)
        if removed:
            self._files.sync_directory(self.root)
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

    def discard(self, hidden: str) -> None:
        """Remove what :meth:`prepare` made."""
        self._files.remove_tree(hidden)
        self._unlock()

    def leave(self) -> None:
        """Nobody knows how far the others got: what is hidden stays for the next save to finish or to remove."""
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if self._tag is not None:
            self._owners.ended(self.root, self._tag)
            self._tag = None
        if lock is not None:
            with contextlib.suppress(OSError):
                self._files.close(lock)


def describe(error: BaseException) -> str:
    """An error as a message for the other ranks."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{explain(error.errno)}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
