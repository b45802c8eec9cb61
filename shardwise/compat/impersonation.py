"""Import our package under a foreign library's name, for programs that are not changed at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shardwise.compat.table import HOMES, alias_table

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

__all__ = ["REPLACEABLE", "Impersonation", "impersonate"]

REPLACEABLE = ("colossalai", "deepspeed")
"""Libraries that we replace completely, so that our package can be imported under their name."""


class Impersonation(MetaPathFinder, Loader):
    """Imports our modules under the name of the library ``foreign``."""

    def __init__(self, foreign: str) -> None:
        self.foreign = foreign
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of our module."""
        top, dot, below = fullname.partition(".")
        if top != self.foreign:
            return None
        home = f"{HOMES[top]}{dot}{below}"
        try:
            there = find_spec(home) is not None
        except ModuleNotFoundError:  # importlib expects None
            return None
        return ModuleSpec(fullname, self, origin=home, is_package=True) if there else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return our module, which keeps its own spec."""
        module = import_module(str(spec.origin))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec: the module has run already, under its own name."""
        alias = module.__spec__.name if module.__spec__ is not None else ""
        module.__spec__ = self._specs.pop(alias, module.__spec__)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Answer ``importlib.metadata.version(...)``, with which programs check that a library is installed."""
        if context is not None and context.name not in (None, self.foreign):
            return []
        return [_distribution(self.foreign)]


def _distribution(foreign: str) -> Distribution:
    """Return metadata with the name and the version of the library."""
    from importlib.metadata import Distribution  # slower than everything else before the program starts

    class Named(Distribution):
        """A distribution without files."""

        def read_text(self, filename: str) -> str | None:
            if filename != "METADATA":
                return None
            return f"Metadata-Version: 2.1\nName: {foreign}\nVersion: {alias_table(foreign).version}\n"

        def locate_file(self, path: str | PathLike[str]) -> Path:
            return Path(__file__).parent / path

    return Named()


def impersonate(foreign: str) -> None:
    """Import our package under the name ``foreign``, one of :data:`REPLACEABLE`, from now on in this process.

    Raises:
        ImportError: the library itself has been imported already, so that parts of the program would use it.
    """
    library, home = sys.modules.get(foreign), HOMES[foreign]
    if library is not None and library.__name__ != home:
        raise ImportError(
            f"{foreign} is imported already, from {getattr(library, '__file__', None)}. {home} can replace it only "
            "before the first import of it: move this call to the first line of the program"
        )
    if not any(isinstance(each, Impersonation) and each.foreign == foreign for each in sys.meta_path):
        sys.meta_path.insert(0, Impersonation(foreign))
