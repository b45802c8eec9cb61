"""What ``importlib.metadata`` finds of a library whose name is ours.

In a file of its own, since its import takes longer than all else that a process does before its program starts.
"""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path

from shardwise.compat.table import read_world

__all__ = ["Named"]


class Named(Distribution):
    """What is installed, as far as programs ask: a name and a version."""

    def __init__(self, foreign: str) -> None:
        self.foreign = foreign

    def read_text(self, filename: str) -> str | None:
        """The metadata; there is no other file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {self.foreign}\nVersion: {read_world(self.foreign).version}\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Beside this file, as nothing of it is elsewhere."""
        return Path(__file__).parent / path
