"""A foreign library's own name for our package, for programs that are not to be changed at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from shardwise.compat.table import HOMES

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["WHOLE", "Impersonation", "impersonate"]

WHOLE = ("colossalai", "deepspeed")
"""Libraries of which we take the whole place, so that their name can be ours."""


class Impersonation(MetaPathFinder, Loader):
    """Finds the library ``foreign`` and all below it: the very modules of our package that takes its place."""

    def __init__(self, foreign: str) -> None:
        self.foreign = foreign
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec whose module is the one at home."""
        top, dot, below = fullname.partition(".")
        if top != self.foreign:
            return None
        home = f"{HOMES[top]}{dot}{below}"
        try:
            there = find_spec(home) is not None
        except ModuleNotFoundError:  # which importlib says by None
            return None
        return ModuleSpec(fullname, self, origin=home, is_package=True) if there else None

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
        if context is not None and context.name not in (None, self.foreign):
            return []
        return [import_module("shardwise.compat.distribution").Named(self.foreign)]


def impersonate(foreign: str) -> None:
    """From now on the name ``foreign``, one of :data:`WHOLE`, means our package, in this process.

    Raises:
        ImportError: the library itself has been imported already, so that some of the program would use it.
    """
    there, home = sys.modules.get(foreign), HOMES[foreign]
    if there is not None and there.__name__ != home:
        raise ImportError(
            f"{foreign} is imported already, from {getattr(there, '__file__', None)}: {home} takes its "
            f"place only before anything has imported it. Move this import to the program's first line"
        )
    if not any(isinstance(each, Impersonation) and each.foreign == foreign for each in sys.meta_path):
        sys.meta_path.insert(0, Impersonation(foreign))
