"""How the table is written: several names at once."""

from __future__ import annotations

from shardwise.worlds import Here
from shardwise.worlds.table import Entry

__all__ = ["alike", "same"]


def same(module: str, names: str) -> dict[str, Entry]:
    """Names, parted by blanks, that are called the same in one of our modules."""
    return {name: Here(module) for name in names.split()}


def alike(names: str, entry: Entry) -> dict[str, Entry]:
    """Names, parted by blanks, of which the table says the same."""
    return dict.fromkeys(names.split(), entry)
