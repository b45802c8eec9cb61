"""A stand-in for system calls, which counts them and makes one of them fail."""

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from shardwise.core.checkpoint import atomic, directory
from shardwise.core.checkpoint.formats import atomic_files, native

SHORT = 0  # a short write
CHANGING = ("mkdir", "makedirs", "open", "close", "link", "rename", "unlink", "rmdir")
WRITING = (*CHANGING, "posix_fallocate", "pwrite", "fsync")
READING = ("listdir", "stat", "preadv")


class System:
    """Stands in for ``os`` and ``fcntl`` in a module. Attribute access returns the real function, counted."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.number, self.failed = errno.EIO, ""

    def arm(self, at: int | None, number: int = errno.EIO) -> None:
        """Let call number ``at`` from now fail (``None``: none)."""
        self.at, self.number, self.failed = at, number, ""

    def __getattr__(self, name: str) -> Any:
        if name == "flock":
            return self._watched(name, fcntl.flock)
        if name.startswith("LOCK_"):
            return getattr(fcntl, name)
        real = getattr(os, name)
        return self._watched(name, real) if name in WRITING or name in READING else real

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            return self.fail(name, real, args) if self.reached(name) else real(*args, **named)

        return call

    def reached(self, name: str) -> bool:
        """Return whether the present call is the one that has to fail."""
        if self.at is None or (self.number == SHORT and name != "pwrite"):
            return False
        self.at -= 1
        if self.at >= 0:
            return False
        self.at = None
        return True

    def fail(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Fail as the system does: a failed close has closed the file, a full disk has written some of the bytes."""
        self.failed = name
        if name in ("fsync", "close"):
            kind = "directory" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "file"
            self.failed = f"{name} of a {kind}"
        if name == "close":
            real(*args)
        if name == "pwrite" and self.number in (SHORT, errno.ENOSPC):
            fd, data, offset = args
            done: int = real(fd, data[: (len(data) + 1) // 2], offset)
            if self.number == SHORT:
                return done
        raise OSError(self.number, os.strerror(self.number), args[0] if isinstance(args[0], str) else None)


@contextmanager
def in_place_of_the_system(can_exchange: bool) -> Iterator[System]:
    """Let every module that changes a checkpoint's files call the stand-in."""
    system, renameat2 = System(), atomic.DISK._renameat2

    def exchange(*args: Any) -> int:
        if not can_exchange:
            ctypes.set_errno(errno.ENOSYS)
            return -1
        if system.reached("renameat2"):
            system.failed = "renameat2"
            ctypes.set_errno(system.number)
            return -1
        return int(renameat2(*args))

    with ExitStack() as stack:
        for module in (atomic, directory, native, atomic_files):
            stack.enter_context(mock.patch.object(module, "os", system))
        stack.enter_context(mock.patch.object(atomic, "fcntl", system))
        stack.enter_context(mock.patch.object(atomic.DISK, "_renameat2", exchange))
        yield system
