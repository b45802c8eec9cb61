"""A foreign library's own name for a world, for programs that are not to be changed at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shardwise.worlds.table import World

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["Impersonation", "impersonate", "impersonate_table"]


class Impersonation(MetaPathFinder, Loader):
    """Finds a library and all below it: the very modules of our package that takes its place.

    Args:
        foreign: the library.
        home: the package.
        read: its table, which is asked for when something below the library is imported.
    """

    def __init__(self, foreign: str, home: str, read: Callable[[], World]) -> None:
        self.foreign, self.home, self._read = foreign, home, read
        self._specs: dict[str, ModuleSpec | None] = {}

    @cached_property
    def world(self) -> World:
        return self._read()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec whose module is the one at home."""
        top, dot, below = fullname.partition(".")
        if top != self.foreign:
            return None
        if below and not self.world.has_module(below) and not _is_file(f"{self.home}.{below}"):
            return None
        return ModuleSpec(fullname, self, origin=f"{self.home}{dot}{below}", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module at home, which keeps its own spec."""
        module = import_module(str(spec.origin))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already, under its own name."""
        alias = module.__spec__.name if module.__spec__ is not None else ""
        module.__spec__ = self._specs.pop(alias, module.__spec__)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """``importlib.metadata.version(...)``, by which programs ask whether a library is there."""
        asked = None if context is None else context.name
        return [import_module("shardwise.worlds.distribution").Named(self)] if asked in (None, self.foreign) else []


def impersonate(world: World) -> None:
    """From now on ``import <world.foreign>`` means ``world.home``, in this process.

    Raises:
        ImportError: the library itself has been imported already, so that some of the program would use it.
    """
    _install(Impersonation(world.foreign, world.home, lambda: world))


def impersonate_table(foreign: str, table: str) -> None:
    """The same for a library whose ``WORLD`` is in the module ``table`` of its home, which is imported when it is used.

    Raises:
        ImportError: the library itself has been imported already.
    """

    def read() -> World:
        world: World = import_module(table).WORLD
        return world

    _install(Impersonation(foreign, table.rpartition(".")[0], read))


def _install(finder: Impersonation) -> None:
    there = sys.modules.get(finder.foreign)
    if there is not None and there.__name__ != finder.home:
        raise ImportError(
            f"{finder.foreign} is imported already, from {getattr(there, '__file__', None)}: {finder.home} takes its "
            f"place only before anything has imported it. Move this import to the program's first line"
        )
    if not any(isinstance(each, Impersonation) and each.home == finder.home for each in sys.meta_path):
        sys.meta_path.insert(0, finder)


def _is_file(name: str) -> bool:
    parent, _, last = name.rpartition(".")
    folders = getattr(import_module(parent), "__path__", ())
    return any((Path(each) / f"{last}.py").is_file() or (Path(each) / last).is_dir() for each in folders)
