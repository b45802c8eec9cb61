"""Directories that appear whole: written under a hidden name beside their place, which they take in one step.

``.<name>.saving-<hex>`` is being written (or was exchanged for its successor), ``.<name>.replaced-<hex>`` stepped aside
where the system cannot exchange names, and ``.<name>.purged-<hex>`` is being deleted. Directories of other formats
have ``output-saving`` and ``output-replaced``: they may stand among the checkpoints of a run, whose saves leave them
alone. A killed process may leave any of these; the next writer calls :func:`settle_leftovers`. Files of
another origin in a directory that is replaced are taken along: see :mod:`shardwise.core.checkpoint.foreign`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.core.checkpoint.file_system import DISK, sync_tree
from shardwise.core.checkpoint.foreign import settle, take_along

__all__ = ["HIDDEN", "AtomicDirectory", "Owned", "atomic_directory", "hidden_name", "settle_leftovers"]

HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced|purged)-[0-9a-f]{16}")
"""What belongs to checkpoints of a run."""
OUTPUT = "output-"
"""Begins the kind of what belongs to other directories."""
Owned = Callable[[str], bool]
"""Says of a file name whether a save writes it: such files of an earlier save are not kept."""


def hidden_name(path: str, kind: str) -> str:
    """A fresh name beside ``path``; ``kind`` is one of those in :data:`HIDDEN`, perhaps after :data:`OUTPUT`."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{kind}-{secrets.token_hex(8)}")


class AtomicDirectory:
    """One that is being written. Nothing is visible before :meth:`commit`, and all of it afterwards.

    Args:
        path: the directory to make or replace.
        owned: which files in it a save writes.
        files: the file system.
        prefix: of the kind in hidden names.

    Attributes:
        hidden: where to write.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: str, owned: Owned, files: Any = DISK, prefix: str = "") -> None:
        self.path, self._owned, self._files, self._prefix = path, owned, files, prefix
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.hidden = hidden_name(path, f"{prefix}saving")
        files.make_directory(self.hidden)
        # It tells others that this is no leftover; the system drops it when the process ends.
        self._lock: int | None = files.lock_directory(self.hidden)
        self._committed = False
        self._replaced: str | None = None

    def take_along(self) -> None:
        """Files of another origin that stand at the path are in the new directory too.

        Raises:
            CheckpointError: one can be neither linked nor copied.
        """
        if os.path.isdir(self.path):
            take_along(self._files, self.path, self.hidden, _by_path(self._owned))

    def commit(self) -> None:
        """Give the directory its name in one step (two renames where the system cannot exchange names). Call
        :meth:`finish` then, or :meth:`discard` where this raises.

        Raises:
            OSError: what stood there is still there.
        """
        files, path, parent = self._files, self.path, os.path.dirname(self.path)
        aside = hidden_name(path, f"{self._prefix}replaced")
        replaces = os.path.lexists(path)
        exchanged = replaces and files.exchange(self.hidden, path)
        if not exchanged:
            if replaces:
                files.rename(path, aside)
            try:
                files.rename(self.hidden, path)
            except BaseException:
                if replaces:
                    files.rename(aside, path)
                raise
        try:
            files.sync_directory(parent)
        except BaseException:  # the new name may not survive a power failure: what was there before is put back
            if exchanged:
                files.exchange(self.hidden, path)
            else:
                files.rename(path, self.hidden)
                if replaces:
                    files.rename(aside, path)
            raise
        self._committed = True  # what has the hidden name now is what was replaced
        self._unlock()
        if replaces:
            self._replaced = self.hidden if exchanged else aside

    def finish(self) -> None:
        """Remove what :meth:`commit` replaced.

        Raises:
            CheckpointError: something in it that a save did not write could not be moved over; it is still there.
        """
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            _settle(self._files, replaced, self.path, self._owned)

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        if not self._committed:
            self._files.remove_tree(self.hidden)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                self._files.close(lock)


@contextmanager
def atomic_directory(path: Path, owned: Owned) -> Iterator[Path]:
    """A fresh directory to write into; when the block ends without an error it is flushed and takes the place of
    ``path``.

    Raises:
        NotADirectoryError: ``path`` is a file.
        OSError: nothing can be written there; what stood at ``path`` is still there.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give a directory to write to")
    # A link at the end is replaced, and those before it are followed: ".." behind one leads out of what it points to.
    plain = path.name not in ("", "..")
    place = os.path.join(os.path.realpath(path.parent), path.name) if plain else os.path.realpath(path)
    parent, name = os.path.split(place)
    if os.path.isdir(parent):
        hidden = re.compile(rf"\.(?P<name>{re.escape(name)})\.{OUTPUT}(?P<kind>saving|replaced)-[0-9a-f]{{16}}")
        settle_leftovers(parent, owned, hidden=hidden)
    directory = AtomicDirectory(place, owned, prefix=OUTPUT)
    try:
        yield Path(directory.hidden)
        directory.take_along()
        sync_tree(directory.hidden)
        directory.commit()
    except BaseException:
        directory.discard()
        raise
    directory.finish()


def settle_leftovers(
    root: str, owned: Owned, files: Any = DISK, hidden: re.Pattern[str] = HIDDEN, last: str | None = None
) -> list[str]:
    """Finish or undo what killed processes left in ``root``.

    Args:
        root: the directory.
        owned: which files in what they left a save writes.
        files: the file system.
        hidden: the names it has.
        last: the file that is written last. A directory that has it is whole, and may have been exchanged for its
            successor: what is in it and not a save's moves over.

    Returns:
        The directories that other processes (or threads) are writing there now.
    """
    busy = []
    for name in sorted(files.list_directory(root)):
        match = hidden.fullmatch(name)
        if match is None:
            continue
        path, final = os.path.join(root, name), os.path.join(root, match["name"])
        if match["kind"] == "replaced" and os.path.isdir(path) and not os.path.islink(path):
            if os.path.lexists(final):
                _settle(files, path, final, owned)
            else:  # a kill between two renames
                files.rename(path, final)
                files.sync_directory(root)
        elif match["kind"] == "saving" and _is_being_written(files, path):
            busy.append(path)
        elif last and os.path.isfile(os.path.join(path, last)) and os.path.isdir(final):
            _settle(files, path, final, owned)
        else:
            files.remove_tree(path)
    return busy


def _is_being_written(files: Any, path: str) -> bool:
    if os.path.islink(path):
        return False
    with contextlib.suppress(OSError):
        lock = files.lock_directory(path)
        if lock is None:
            return True
        files.close(lock)
    return False


def _settle(files: Any, replaced: str, final: str, owned: Owned) -> None:
    """Remove a directory that ``final`` has replaced; what appeared in it meanwhile moves over."""
    if os.path.islink(replaced) or not os.path.isdir(replaced):  # of a link only the name is ours
        files.remove_tree(replaced)
    elif os.path.isdir(final):
        settle(files, replaced, final, _by_path(owned))


def _by_path(owned: Owned) -> Callable[[str], bool]:
    """The same of a path; a folder of such a name is somebody else's."""
    return lambda path: owned(os.path.basename(path)) and (os.path.islink(path) or not os.path.isdir(path))
