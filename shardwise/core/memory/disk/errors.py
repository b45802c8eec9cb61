"""Errors of the disk tier, with advice."""

from __future__ import annotations

import errno as codes
import os

_ADVICE = {
    codes.ENOSPC: "free space there, or choose a directory on a larger file system",
    codes.EDQUOT: "raise the quota, or choose a directory on another file system",
    codes.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another file system",
    codes.EIO: "the device failed; look at the kernel's log and choose a directory on another device",
    codes.EROFS: "the file system is read-only; choose a directory that can be written",
    codes.EACCES: "choose a directory that this user can write",
    codes.EPERM: "choose a directory that this user can write",
    codes.ENOTDIR: "choose a directory, not a file",
    codes.EEXIST: "choose a directory, not a file",
    codes.EMFILE: "raise the limit on open files (ulimit -n)",
}


class DiskError(RuntimeError):
    """An operation of NVMe offload failed. What was stored before is intact.

    Attributes:
        errno: the system's error number; 0 without one (a wrong checksum, a short file).

    Examples:
        >>> try:
        ...     session.optimizer.step()
        ... except shardwise.DiskError as error:
        ...     print(f"error {error.errno} of the disk")
    """

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[DiskError], tuple[str, int]]:
        return type(self), (str(self), self.errno)


def explain(number: int) -> str:
    """Return the name and text of an errno, and what to do about it."""
    name = codes.errorcode.get(number, "unknown error")
    advice = _ADVICE.get(number, "choose a directory on another file system if this repeats")
    return f"{name} (errno {number}): {os.strerror(number)}; {advice}"
