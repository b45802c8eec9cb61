"""The file of one rank, and the directory of one run that holds it.

The file is opened for direct I/O and without a name if that is supported, with its space reserved. It is in a directory
``shardwise-disk-<16 hexadecimal digits>`` with a file ``lock``, which is under flock for as long as its process lives.
The system releases the lock when the process ends for any reason, so a process that can lock such a directory may
remove it. Every new run directory first removes abandoned directories in the same parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno as codes
import fcntl
import mmap
import os
import re
import secrets
import socket
from pathlib import Path

from shardwise.core.base.warnings import warn_user
from shardwise.core.memory.disk.errors import DiskError, explain
from shardwise.core.memory.disk.io_threads import ALIGNMENT_BYTES, Request

_NAME = re.compile(r"shardwise-disk-[0-9a-f]{16}")
_OURS = re.compile(r"lock|rank\d+\.data")
_LOCK = "lock"
_ATTEMPTS = 20
_NO_LOCKS = (codes.ENOLCK, codes.EOPNOTSUPP, codes.ENOSYS)  # some network file systems


class RunDirectory:
    """A new directory under ``parent`` (created if it is missing), locked until :meth:`close`.

    Attributes:
        path: the directory.
        removed: names of abandoned run directories that were removed.

    Raises:
        DiskError: ``parent`` cannot be created or written.
    """

    def __init__(self, parent: str) -> None:
        # A forked child shares the lock; only the process that created the directory may remove it.
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
        """Remove the directory and our files in it, and release the lock. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock < 0 or os.getpid() != self._owner:
            return
        _empty(self.path)
        os.close(lock)


def remove_abandoned(parent: str) -> list[str]:
    """Remove the run directories in ``parent`` whose process is gone; return the names of those that had been in use.

    Directories of running processes, of other users and with other names are not touched.
    """
    removed = []
    with os.scandir(parent) as entries:
        names = [e.name for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    for name in sorted(names):
        path = os.path.join(parent, name)
        # Without a lock file it is empty, or is being created: then its creator retries with another name.
        with contextlib.suppress(OSError):
            os.rmdir(path)
            continue
        with contextlib.suppress(OSError):
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(lock)
                if status.st_nlink:  # otherwise its owner has just closed it
                    _empty(path)
                    if status.st_size:  # otherwise it is being created: its creator retries with another name
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
            continue  # another process that starts now has removed it as abandoned
        if _take(lock):
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return path, lock
        os.close(lock)
    raise OSError(codes.EBUSY, f"{_ATTEMPTS} new run directories in {parent!r} were removed by others")


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # another process is removing it
    except OSError as error:
        # Without support for locks, no other process can take this one, so the directory is never removed by mistake.
        if error.errno not in _NO_LOCKS:
            raise
    return os.fstat(lock).st_nlink > 0


def _empty(path: str) -> None:
    """Remove our files, and the directory if it is empty then. The lock goes last, since it protects the others."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(path) if _OURS.fullmatch(name)]
        for name in sorted(names, key=lambda name: name == _LOCK):
            Path(path, name).unlink(missing_ok=True)
        os.rmdir(path)


_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # magic numbers of statfs(2)


class DiskFile:
    """A new file at ``path``, for this process only.

    Its name is removed as soon as the file is open, so that no other process can open or replace it, and the system
    frees the space when this process ends for any reason. If a file without a name cannot be used (some network file
    systems), the name stays until :meth:`close`.

    Attributes:
        path: the path of the file, for messages.
        fd: file descriptor of the file.
        direct: whether transfers bypass the page cache (O_DIRECT).
        named: whether the name still exists.
        nbytes: number of bytes reserved so far.

    Warns:
        UserWarning: once, if direct I/O is refused or the directory is in memory; transfers are buffered then.

    Raises:
        DiskError: the file cannot be created.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.nbytes = 0
        self._owner = os.getpid()
        self.fd, self.named = -1, False
        kind = _in_memory(os.path.dirname(path))
        try:
            self.direct = kind is None and self._start(os.O_DIRECT)
            if not self.direct:
                self._start(0)
        except OSError as error:
            raise DiskError(f"cannot make {path}: {explain(error.errno or 0)}", error.errno or 0) from error
        if not self.direct:
            reason = "the file system refuses O_DIRECT" if kind is None else f"{kind} is memory, not a disk"
            warn_user(
                f"buffered I/O in {os.path.dirname(path)!r}: {reason}. Choose a directory on a local disk, or expect "
                "slow transfers and a full page cache"
            )

    def reserve(self, nbytes: int, purpose: str) -> int:
        """Reserve ``nbytes`` more (a multiple of :data:`ALIGNMENT_BYTES`) on the device, and return their offset.

        Raises:
            DiskError: no space is left, or another limit is reached; previous reservations are kept.
        """
        offset = self.nbytes
        if nbytes == 0:
            return offset
        try:
            facts = os.fstatvfs(self.fd)
            if facts.f_blocks and nbytes > facts.f_bavail * facts.f_frsize:
                # Some file systems fill up completely before they refuse a request that is too large.
                raise OSError(codes.ENOSPC, os.strerror(codes.ENOSPC))
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            # Remove what the failed attempt may have added.
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, offset)
            raise DiskError(
                f"cannot reserve {nbytes} bytes for {purpose} in {self.path} after {offset} bytes there already; "
                f"free: {self.free_bytes()} bytes; {explain(error.errno or 0)}",
                error.errno or 0,
            ) from error
        self.nbytes += nbytes
        return offset

    def transfer(self, request: Request) -> int:
        """Run one system call, and return the number of bytes that it transferred, which may be less than requested.

        Raises:
            OSError: the system call failed.
        """
        memory = (ctypes.c_char * request.nbytes).from_address(request.address)
        return (os.pwritev if request.writing else os.preadv)(self.fd, [memory], request.offset)

    def free_bytes(self) -> int:
        """Return the number of free bytes on the file system for this user; 0 if it is unknown."""
        with contextlib.suppress(OSError):
            facts = os.fstatvfs(self.fd)
            return facts.f_bavail * facts.f_frsize
        return 0

    def close(self) -> None:
        """Close the file and remove its name. Idempotent."""
        if self.fd >= 0:
            self._discard()

    def _start(self, direct: int) -> bool:
        """Create the file and test it; return False if ``direct`` (O_DIRECT or 0) is refused."""
        # Test a write: some file systems accept O_DIRECT in open() and refuse it at the first transfer.
        with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
            for self.named in (False, True):
                try:
                    self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o600)
                    os.pwritev(self.fd, [block], 0)
                except OSError as error:
                    self._discard()
                    if direct and error.errno in (codes.EINVAL, codes.EOPNOTSUPP):
                        return False
                    raise
                if self.named or self._unlink(block):
                    break
                self._discard()
        os.ftruncate(self.fd, 0)
        return True

    def _unlink(self, block: mmap.mmap) -> bool:
        """Remove the name, and return True if the file can still be used."""
        try:
            os.unlink(self.path)
            return os.preadv(self.fd, [block], 0) == ALIGNMENT_BYTES
        except OSError:
            return False

    def _discard(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if os.getpid() == self._owner:  # a forked child has the descriptor, too, but does not own the name
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _in_memory(directory: str) -> str | None:
    """Return the name of the file system if it is in memory; such a file system may accept and ignore O_DIRECT."""
    facts = ctypes.create_string_buffer(256)  # struct statfs; its first word is the type of the file system
    if ctypes.CDLL(None).statfs(os.fsencode(directory), facts) != 0:
        return None
    return _IN_MEMORY.get(ctypes.c_long.from_buffer(facts).value)
