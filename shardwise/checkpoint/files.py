"""The error of every checkpoint."""

from __future__ import annotations

from shardwise.printable import printable

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. What its text repeats of a file can be shown on any terminal."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in args))
