"""Modules of a foreign layout, made from a world's table when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shardwise.compat.absent import refusing
from shardwise.compat.table import REST, Here, World

__all__ = ["Mirror", "lookup", "mirror"]


class Mirror(MetaPathFinder, Loader):
    """Finds what is below ``world.home`` and is no file there."""

    def __init__(self, world: World) -> None:
        self.world = world

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of the table.

        Raises:
            ModuleNotFoundError: neither a module nor a name of it. (``from module import name`` asks here for a name
                that the module has not, and would say only that it cannot be imported.)
        """
        if not fullname.startswith(f"{self.world.home}."):
            return None
        below = fullname.removeprefix(f"{self.world.home}.")
        if not self.world.has_module(below):
            module, _, name = below.rpartition(".")
            raise ModuleNotFoundError(_unknown(self.world, module, name))
        return ModuleSpec(fullname, self, origin=self.world.home, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """One whose names are looked up in the table when they are asked for."""
        path = spec.name.removeprefix(f"{self.world.home}.")
        module = ModuleType(spec.name, f"Names of {self.world.full_name(path)}.")
        module.__getattr__ = partial(lookup, self.world, path)  # type: ignore[method-assign]
        module.__all__ = sorted({*self.world.names.get(path, {})} - {REST})  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run."""


def mirror(world: World) -> Callable[[str], Any]:
    """Make ``world`` importable below its home, from which this is called once: it is the home's ``__getattr__``."""
    if not any(isinstance(each, Mirror) and each.world is world for each in sys.meta_path):
        sys.meta_path.append(Mirror(world))  # after the one that finds files
    return partial(lookup, world, "")


def lookup(world: World, path: str, name: str) -> Any:
    """What ``name`` of the module ``path`` is here.

    Raises:
        AttributeError: the table does not have it.
    """
    entry = world.find(path, name)
    if isinstance(entry, Here):
        return getattr(import_module(entry.module), entry.name)
    if name.startswith("__"):  # which Python asks of modules
        raise AttributeError(name)
    if entry is not None:
        return refusing(world.full_name(path, name), entry.instead)
    below = f"{path}.{name}".lstrip(".")
    if world.has_module(below):
        return import_module(f"{world.home}.{below}")
    raise AttributeError(_unknown(world, path, name))


def _unknown(world: World, path: str, name: str) -> str:
    return (
        f"{world.full_name(path)} has nothing of the name {name!r} in shardwise (its names are those of "
        f"{world.foreign} {world.version}): `shardwise port FILE` says of each name of a program what to do"
    )
