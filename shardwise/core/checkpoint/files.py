"""The error of every checkpoint, and what other ranks are told of one."""

from __future__ import annotations

from shardwise.core.base.printable import printable
from shardwise.core.memory.disk.errors import explain

__all__ = ["CheckpointError", "describe"]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. What its text repeats of a file can be shown on any terminal."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))


def describe(error: BaseException) -> str:
    """An error as a message for the other ranks."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{explain(error.errno)}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
