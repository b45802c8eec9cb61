"""What ``importlib.metadata`` finds of a library whose name is ours.

In a file of its own, since what it imports takes longer than the rest of what every process does that a program starts.
"""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.worlds.impersonation import Impersonation

__all__ = ["Named"]


class Named(Distribution):
    """What is installed, as far as programs ask: a name and a version."""

    def __init__(self, finder: Impersonation) -> None:
        self._finder = finder

    @property
    def name(self) -> str:
        """Without a look into the table: torch asks for all names while it is imported, which the table imports."""
        return self._finder.foreign

    def read_text(self, filename: str) -> str | None:
        """The metadata; there is no other file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self._finder.world.version}\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Beside this file, as nothing of it is elsewhere."""
        return Path(__file__).parent / path
