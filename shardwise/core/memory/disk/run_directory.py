"""A directory that belongs to one running process and disappears with it.

``shardwise-disk-<16 hexadecimal digits>`` holds a file ``lock``, under flock for as long as its process lives, and the
process's data. The system releases the lock when the process ends, however it ends; so whoever can take the lock of
such a directory may remove it. Every new run directory first does that with all its neighbours.
"""

from __future__ import annotations

import contextlib
import errno as codes
import fcntl
import os
import re
import secrets
import socket
from pathlib import Path

from shardwise.core.memory.disk.errors import DiskError, explain

__all__ = ["RunDirectory", "remove_abandoned"]

_NAME = re.compile(r"shardwise-disk-[0-9a-f]{16}")
_OURS = re.compile(r"lock|rank\d+\.data")
_LOCK = "lock"
_ATTEMPTS = 20
_NO_LOCKS = (codes.ENOLCK, codes.EOPNOTSUPP, codes.ENOSYS)  # some network file systems


class RunDirectory:
    """A fresh directory under ``parent`` (made where it is missing), locked until :meth:`close`.

    Attributes:
        path: the directory.
        removed: names of abandoned neighbours that were removed.

    Raises:
        DiskError: ``parent`` cannot be made or written.
    """

    def __init__(self, parent: str) -> None:
        # A forked child shares the lock; only the process that made the directory may remove it.
        self._owner = os.getpid()
        try:
            os.makedirs(parent, exist_ok=True)
            self.removed = remove_abandoned(parent)
            self.path, self._lock = _make(parent)
        except OSError as error:
            raise DiskError(
                f"cannot make a run directory in {parent!r}: {explain(error.errno or 0)}", error.errno or 0
            ) from error

    def close(self) -> None:
        """Removes the directory with what is in it of ours, and releases the lock. May be called again."""
        lock, self._lock = self._lock, -1
        if lock < 0 or os.getpid() != self._owner:
            return
        _empty(self.path)
        os.close(lock)


def remove_abandoned(parent: str) -> list[str]:
    """Removes the run directories in ``parent`` whose process is gone; returns the names of those that had been in use.

    Directories of living processes, of other users and with other names stay.
    """
    removed = []
    with os.scandir(parent) as entries:
        names = [e.name for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    for name in sorted(names):
        path = os.path.join(parent, name)
        # Without a lock file it is empty, or is just being made: then its maker starts again with another name.
        with contextlib.suppress(OSError):
            os.rmdir(path)
            continue
        with contextlib.suppress(OSError):
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(lock)
                if found.st_nlink:  # else its owner has just closed it
                    _empty(path)
                    if found.st_size:  # else it is just being made: its maker starts again with another name
                        removed.append(name)
            finally:
                os.close(lock)
    return removed


def _make(parent: str) -> tuple[str, int]:
    for _ in range(_ATTEMPTS):
        path = os.path.join(parent, f"shardwise-disk-{secrets.token_hex(8)}")
        os.mkdir(path, 0o700)
        try:
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a neighbour that starts now took it for an abandoned one
        if _take(lock):
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return path, lock
        os.close(lock)
    raise OSError(codes.EBUSY, f"{_ATTEMPTS} new run directories in {parent!r} were removed by others")


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # a neighbour was faster and is removing it
    except OSError as error:
        # Where there are no locks nobody can take this one either, so the directory is never removed by mistake.
        if error.errno not in _NO_LOCKS:
            raise
    return os.fstat(lock).st_nlink > 0


def _empty(path: str) -> None:
    """Removes what is ours; a directory with anything else in it stays. The lock goes last: it guards the others."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(path) if _OURS.fullmatch(name)]
        for name in sorted(names, key=lambda name: name == _LOCK):
            Path(path, name).unlink(missing_ok=True)
        os.rmdir(path)
