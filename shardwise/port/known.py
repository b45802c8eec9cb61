"""The worlds whose programs can be ported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module

from shardwise.worlds import World

__all__ = ["WHOLE", "of", "worlds"]

WHOLE: Mapping[str, str] = {
    "colossalai": "shardwise.colossalai.names",
    "deepspeed": "shardwise.deepspeed.names",
}
"""Libraries of which we take the place, each with the module that has its ``WORLD``."""
BESIDE = ("shardwise.huggingface.names", "shardwise.strategies.names")
"""Modules with the ``WORLDS`` of libraries that stay beside us."""


@cache
def worlds() -> tuple[World, ...]:
    """All of them, each table read once."""
    found: list[World] = [import_module(name).WORLD for name in WHOLE.values()]
    for name in BESIDE:
        found.extend(import_module(name).WORLDS)
    return tuple(found)


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
