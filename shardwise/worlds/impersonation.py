"""A foreign library's own name for a world, for programs that are not to be changed at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shardwise.worlds.table import HOMES, World, read_world

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["WHOLE", "Impersonation", "impersonate"]

WHOLE = ("colossalai", "deepspeed")
"""Libraries of which we take the whole place, so that their name can be ours."""


class Impersonation(MetaPathFinder, Loader):
    """Finds a library and all below it: the very modules of our package that takes its place.

    The table is read when something below the library is imported.
    """

    def __init__(self, foreign: str, home: str) -> None:
        self.foreign, self.home = foreign, home
        self._specs: dict[str, ModuleSpec | None] = {}

    @cached_property
    def world(self) -> World:
        return read_world(self.foreign)

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


def impersonate(foreign: str) -> None:
    """From now on the name ``foreign``, one of :data:`WHOLE`, means our package, in this process.

    Raises:
        ImportError: the library itself has been imported already, so that some of the program would use it.
    """
    home = HOMES[foreign]
    there = sys.modules.get(foreign)
    if there is not None and there.__name__ != home:
        raise ImportError(
            f"{foreign} is imported already, from {getattr(there, '__file__', None)}: {home} takes its "
            f"place only before anything has imported it. Move this import to the program's first line"
        )
    if not any(isinstance(each, Impersonation) and each.foreign == foreign for each in sys.meta_path):
        sys.meta_path.insert(0, Impersonation(foreign, home))


def _is_file(name: str) -> bool:
    parent, _, last = name.rpartition(".")
    folders = getattr(import_module(parent), "__path__", ())
    return any((Path(each) / f"{last}.py").is_file() or (Path(each) / last).is_dir() for each in folders)
