"""Directories that appear complete: written under a hidden name next to their place, which they take in one step.

``.<name>.saving-<hex>`` is being written (or was exchanged for its successor), ``.<name>.replaced-<hex>`` stepped aside
if the system cannot exchange names, and ``.<name>.purged-<hex>`` is being deleted. Directories of other formats use
``output-saving`` and ``output-replaced``: they may be in a run's root directory, whose saves ignore them. A killed
process may leave any of these; the next writer calls :func:`settle_leftovers`.

Foreign files (a tokenizer, notes, results) in a directory that is replaced are kept. :func:`take_along` links them
into the new directory before it takes the place of the old one. :func:`settle` moves files that were created or
replaced in the old directory meanwhile, and then removes it.

All calls that change a file system go through :class:`FileSystem`, so that tests can make each of them fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno as codes
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.memory.disk.errors import explain

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_REFUSED = (codes.ENOSYS, codes.EINVAL, codes.EOPNOTSUPP, codes.EPERM)


def _c_function(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)  # type: ignore[no-any-return]
    except (AttributeError, OSError):
        return None


class FileSystem:
    """The operating system's file system. All methods raise ``OSError``."""

    def __init__(self) -> None:
        self._renameat2 = _c_function("renameat2")
        self._sync_file_range = _c_function("sync_file_range")

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> int:
        """Return a descriptor of a new, empty file. An existing file or link of that name is removed first."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o644)
        except FileExistsError:
            self.remove(path)
            return os.open(path, flags, 0o644)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve the space, so that a full disk is an error before anything is written."""
        if nbytes:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` (bytes) at ``offset``."""
        while len(data):
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done

    def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
        """Start to write back these bytes while the caller prepares the next ones; this is a hint to the system."""
        if self._sync_file_range is not None:
            place = (ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(nbytes))
            self._sync_file_range(*place, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_directory(self, path: str) -> None:
        """Flush the names in a directory, so that they survive a power failure, if the file system can."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> bool:
        """Exchange the names of two directories in one step. Return False if the system cannot do that."""
        if self._renameat2 is None:
            return False
        done = self._renameat2(
            _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
        )
        if done == 0:
            return True
        number = ctypes.get_errno()
        if number in _REFUSED:
            return False
        raise OSError(number, os.strerror(number), one)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def lock_directory(self, path: str) -> int | None:
        """Lock a directory, and return a descriptor that holds the lock until it is closed; ``None`` if another process
        has it.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            pass  # some network file systems have no locks
        return fd

    def write_file(self, path: str, content: bytes) -> None:
        """Write a new file, and flush it to the disk."""
        fd = self.create(path)
        try:
            self.write(fd, memoryview(content), 0)
            self.sync(fd)
        finally:
            self.close(fd)

    def list_directory(self, path: str) -> list[str]:
        return os.listdir(path)

    def link(self, path: str, place: str) -> None:
        """Make ``place`` a hard link to ``path``, or a copy if the file system has no hard links."""
        try:
            os.link(path, place, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copy2(path, place, follow_symlinks=False)

    def copy_attributes(self, path: str, place: str) -> None:
        """Copy mode, times and owner of a directory, as far as permitted."""
        with contextlib.suppress(OSError):
            shutil.copystat(path, place)
            there = os.lstat(path)
            os.chown(place, there.st_uid, there.st_gid)

    def open_up(self, path: str) -> None:
        """Make the content of a directory removable, as far as permitted."""
        with contextlib.suppress(OSError):
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                os.chmod(path, 0o700)

    def remove_tree(self, path: str) -> None:
        """Remove a file or a directory with its content as far as possible; of a link, remove only the link."""
        with contextlib.suppress(OSError):
            if os.path.islink(path) or not os.path.isdir(path):
                self.remove(path)
                return
            self.open_up(path)
            for name in os.listdir(path):
                self.remove_tree(os.path.join(path, name))
            self.remove_directory(path)

    def remove_empty(self, path: str) -> None:
        """Remove a directory if it is empty."""
        with contextlib.suppress(OSError):
            self.remove_directory(path)


DISK: Any = FileSystem()
"""The file system that is used outside tests."""


def sync_path(path: str | os.PathLike[str]) -> None:
    """Flush a file or a directory, if the file system can.

    Raises:
        OSError: the written data may not survive a power failure.
    """
    if os.path.isdir(path):
        DISK.sync_directory(os.fspath(path))
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        DISK.sync(handle)
    finally:
        DISK.close(handle)


def sync_tree(directory: str | os.PathLike[str]) -> None:
    """Flush a directory and its content."""
    for place, _, names in os.walk(directory, topdown=False):
        for file in (os.path.join(place, name) for name in names):
            if not os.path.islink(file):
                sync_path(file)
        sync_path(place)


HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced|purged)-[0-9a-f]{16}")
"""Hidden names of checkpoints of a run."""
OUTPUT = "output-"
"""Prefix of the kind in hidden names of other directories."""
Owned = Callable[[str], bool]
"""Return True if a save writes a file of this name. Such files of an earlier save are removed."""


def hidden_name(path: str, kind: str) -> str:
    """Return a new name next to ``path``; ``kind`` is one of :data:`HIDDEN`, perhaps with the prefix :data:`OUTPUT`."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{kind}-{secrets.token_hex(8)}")


class AtomicDirectory:
    """A directory that is being written. It is invisible before :meth:`commit` and complete afterwards.

    Args:
        path: the directory to create or replace.
        owned: whether a save writes a file of that name.
        files: the file system.
        prefix: prefix of the kind in hidden names.

    Attributes:
        hidden: the hidden directory to write into.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, path: str, owned: Owned, files: Any = DISK, prefix: str = "") -> None:
        self.path, self._owned, self._files, self._prefix = path, owned, files, prefix
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.hidden = hidden_name(path, f"{prefix}saving")
        files.make_directory(self.hidden)
        # The lock shows other processes that the directory is in use; the system releases it when the process ends.
        self._lock: int | None = files.lock_directory(self.hidden)
        self._committed = False
        self._replaced: str | None = None

    def take_along(self) -> None:
        """Link foreign files of the existing directory into the new one.

        Raises:
            CheckpointError: a file can be neither linked nor copied.
        """
        if os.path.isdir(self.path):
            take_along(self._files, self.path, self.hidden, _by_path(self._owned))

    def commit(self) -> None:
        """Give the directory its name in one step (two renames if the system cannot exchange names). Call
        :meth:`finish` afterwards, or :meth:`discard` if this raises.

        Raises:
            OSError: an existing directory is unchanged.
        """
        files, path, parent = self._files, self.path, os.path.dirname(self.path)
        replaced = hidden_name(path, f"{self._prefix}replaced")
        replaces = os.path.lexists(path)
        exchanged = replaces and files.exchange(self.hidden, path)
        if not exchanged:
            if replaces:
                files.rename(path, replaced)
            try:
                files.rename(self.hidden, path)
            except BaseException:
                if replaces:
                    files.rename(replaced, path)
                raise
        try:
            files.sync_directory(parent)
        except BaseException:  # the new name may not survive a power failure: restore the old directory
            if exchanged:
                files.exchange(self.hidden, path)
            else:
                files.rename(path, self.hidden)
                if replaces:
                    files.rename(replaced, path)
            raise
        self._committed = True  # the hidden name is now that of the replaced directory
        self._unlock()
        if replaces:
            self._replaced = self.hidden if exchanged else replaced

    def finish(self) -> None:
        """Remove the directory that :meth:`commit` replaced.

        Raises:
            CheckpointError: a foreign file in it could not be moved; it is still there.
        """
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            _settle(self._files, replaced, self.path, self._owned)

    def discard(self) -> None:
        """Remove the directory unless it was committed."""
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
    """Yield a new directory to write into; at the end of the block it is flushed and replaces ``path``.

    Raises:
        NotADirectoryError: ``path`` is a file.
        OSError: the directory cannot be written; an existing ``path`` is unchanged.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give a directory to write to")
    # A link at the end of the path is replaced. Links before it are followed, because ".." after a link leaves the
    # directory that the link points to.
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
    """Finish or undo the unfinished saves of killed processes in ``root``.

    Args:
        root: the directory.
        owned: whether a save writes a file of that name.
        files: the file system.
        hidden: pattern of hidden names.
        last: the file that is written last. A directory that has it is complete and may have been exchanged for its
            successor: foreign files in it are moved.

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
    """Remove a directory that ``final`` has replaced, after its foreign files have been moved."""
    if os.path.islink(replaced) or not os.path.isdir(replaced):  # a link is removed, and its target is left unchanged
        files.remove_tree(replaced)
    elif os.path.isdir(final):
        settle(files, replaced, final, _by_path(owned))


def _by_path(owned: Owned) -> Callable[[str], bool]:
    """Apply ``owned`` to paths; a folder of such a name is foreign."""
    return lambda path: owned(os.path.basename(path)) and (os.path.islink(path) or not os.path.isdir(path))


Ours = Callable[[str], bool]
"""Return True if a path (directly in the directory) belongs to the checkpoint."""


def take_along(files: Any, old: str, fresh: str, ours: Ours) -> None:
    """Add all foreign files of ``old`` to ``fresh``: files and links as hard links (or copies), folders as new folders.
    Existing files of ``fresh`` are kept.

    Raises:
        CheckpointError: a file can be neither linked nor copied, or a folder has the name of a new file. ``old`` is
            unchanged.
    """
    for name in sorted(files.list_directory(old)):
        path, place = os.path.join(old, name), os.path.join(fresh, name)
        if ours(path):
            continue
        try:
            _take(files, path, place)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
        except OSError as error:
            where = error.filename or path
            raise CheckpointError(
                f"{where} does not belong to the checkpoint and cannot be kept: {explain(error.errno or 0)}. Move "
                f"it out of {old}, or save elsewhere"
            ) from error


def _take(files: Any, path: str, place: str) -> None:
    folder = _is_folder(path)
    if os.path.lexists(place):
        if folder and not _is_folder(place):
            raise CheckpointError(f"{path} is a folder where the checkpoint has its own file; rename the folder")
        return
    if not folder:
        files.link(path, place)
        return
    files.make_directory(place)
    for name in sorted(files.list_directory(path)):
        inner = os.path.join(path, name)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            _take(files, inner, os.path.join(place, name))
    files.copy_attributes(path, place)
    files.sync_directory(place)


def settle(files: Any, old: str, new: str, ours: Ours) -> None:
    """Move foreign files from ``old``, which ``new`` has replaced, unless ``new`` has the same or a newer one; then
    remove ``old``. Files that cannot be removed stay for the next save.

    Raises:
        CheckpointError: a file could not be moved; it is still there.
    """
    try:
        # Files of the checkpoint are removed last: they mark the directory as a replaced one if this is interrupted.
        names = sorted(files.list_directory(old), key=lambda name: (ours(os.path.join(old, name)), name))
    except OSError:
        return
    files.open_up(old)
    moved = False
    for name in names:
        path, place = os.path.join(old, name), os.path.join(new, name)
        if ours(path):
            files.remove_tree(path)
        elif _is_folder(path) and _is_folder(place):
            settle(files, path, place, lambda _: False)
        elif not os.path.lexists(place):
            moved = _move(files, path, place) or moved
        elif _is_folder(path) or _is_folder(place):
            continue  # another process has just created it
        elif _is_known(path, place):
            files.remove_tree(path)
        else:
            moved = _move(files, path, place) or moved
    if moved:
        files.sync_directory(new)
    files.remove_empty(old)


def _move(files: Any, path: str, place: str) -> bool:
    try:
        files.rename(path, place)
    except FileNotFoundError:
        if os.path.lexists(path):
            raise
        return False
    except OSError as error:
        raise CheckpointError(
            f"{path} does not belong to the checkpoint and could not be moved to {place}: "
            f"{explain(error.errno or 0)}. Move it yourself"
        ) from error
    return True


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _is_known(path: str, place: str) -> bool:
    """Return True if ``place`` is the same file as ``path``, an unchanged copy of it, or newer."""
    try:
        mine, there = os.lstat(path), os.lstat(place)
    except OSError:
        return False
    unchanged = (mine.st_mtime_ns, mine.st_size) == (there.st_mtime_ns, there.st_size)
    return os.path.samestat(mine, there) or unchanged or there.st_mtime_ns > mine.st_mtime_ns
