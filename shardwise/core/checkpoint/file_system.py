"""Every call by which a checkpoint changes a file system, in one place, so that tests can make each of them fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno as codes
import fcntl
import os
import shutil
from collections.abc import Callable
from typing import Any

__all__ = ["DISK", "FileSystem", "sync_path", "sync_tree"]

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
    """The operating system's own. All methods raise ``OSError``."""

    def __init__(self) -> None:
        self._renameat2 = _c_function("renameat2")
        self._sync_file_range = _c_function("sync_file_range")

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> int:
        """A descriptor of a new, empty file; what had that name (a link, say, to somewhere else) is removed first."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o644)
        except FileExistsError:
            self.remove(path)
            return os.open(path, flags, 0o644)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Take the space now, so that a full disk is found before anything is written."""
        if nbytes:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """All of ``data`` (bytes) at ``offset``."""
        while len(data):
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done

    def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
        """The disk may begin; so that it works while the next bytes are prepared. Only a hint."""
        if self._sync_file_range is not None:
            place = (ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(nbytes))
            self._sync_file_range(*place, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_directory(self, path: str) -> None:
        """Names in it survive a power failure from here on. File systems that cannot do that are left alone."""
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
        """Two directories take each other's names in one step; False where the system cannot do that."""
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
        """A descriptor that holds a lock on it until it is closed; ``None``: another process has it."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            pass  # no locks there (some network file systems)
        return fd

    def write_file(self, path: str, content: bytes) -> None:
        """A new file with this content, on the disk when it returns."""
        fd = self.create(path)
        try:
            self.write(fd, memoryview(content), 0)
            self.sync(fd)
        finally:
            self.close(fd)

    def list_directory(self, path: str) -> list[str]:
        return os.listdir(path)

    def link(self, path: str, place: str) -> None:
        """``place`` is the same file (or symbolic link) as ``path``, or a copy where the file system has no such."""
        try:
            os.link(path, place, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copy2(path, place, follow_symlinks=False)

    def copy_attributes(self, path: str, place: str) -> None:
        """Mode, times and owner of a directory, as far as this user may."""
        with contextlib.suppress(OSError):
            shutil.copystat(path, place)
            there = os.lstat(path)
            os.chown(place, there.st_uid, there.st_gid)

    def open_up(self, path: str) -> None:
        """Let this user remove what is in a directory, as far as possible."""
        with contextlib.suppress(OSError):
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                os.chmod(path, 0o700)

    def remove_tree(self, path: str) -> None:
        """What is at ``path``, with all that is in it, as far as possible; what remains is for the next save to remove.

        Of a link only the name is removed.
        """
        with contextlib.suppress(OSError):
            if os.path.islink(path) or not os.path.isdir(path):
                self.remove(path)
                return
            self.open_up(path)
            for name in os.listdir(path):
                self.remove_tree(os.path.join(path, name))
            self.remove_directory(path)

    def remove_empty(self, path: str) -> None:
        """A directory, if nothing is in it."""
        with contextlib.suppress(OSError):
            self.remove_directory(path)


DISK: Any = FileSystem()
"""What is used unless a test gives another one."""


def sync_path(path: str | os.PathLike[str]) -> None:
    """Flush a file or directory; a file system that cannot flush directories is left alone.

    Raises:
        OSError: what was written may not survive a power failure.
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
    """The same of a directory with all that is in it."""
    for place, _, names in os.walk(directory, topdown=False):
        for file in (os.path.join(place, name) for name in names):
            if not os.path.islink(file):
                sync_path(file)
        sync_path(place)
