"""The worlds whose programs can be ported."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.worlds import World, read_world
from shardwise.worlds.table import HOMES

__all__ = ["of", "worlds"]


def worlds() -> tuple[World, ...]:
    """All of them."""
    return tuple(map(read_world, HOMES))


def of(dotted: str, among: Sequence[World]) -> tuple[World, str] | None:
    """The world that a foreign name is of, or that one of ours takes the place of, and what is below its top."""
    best: tuple[int, World, str] | None = None
    for world in among:
        for name, below in world.also.items():
            if dotted == name or dotted.startswith(f"{name}."):
                return world, below + dotted.removeprefix(name)
        for top in (world.foreign, world.home):
            if (dotted == top or dotted.startswith(f"{top}.")) and (best is None or len(top) > best[0]):
                best = (len(top), world, dotted.removeprefix(top).lstrip("."))
    return best and best[1:]
