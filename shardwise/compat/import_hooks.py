"""Import hooks: modules that are made from an alias table, and our packages under a foreign library's name."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.compat.table import ANY_NAME, HOMES, Alias, AliasTable, alias_table

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder


class UnsupportedName(NotImplementedError, AttributeError):
    """The program used an unsupported name of another library. The message says what to do instead.

    It is also an ``AttributeError``, for programs that call ``hasattr``.
    """


class _UnsupportedClass(ABCMeta):
    """Metaclass of classes that stand for unsupported names.

    Programs import names that they use on some paths only, and use them in ``isinstance``, annotations and base
    classes. It derives from ``ABCMeta``, because another base may have it as its metaclass.
    """

    __refusal__: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedName(cls.__refusal__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # Python and its tools look these up in any class
            raise AttributeError(name)
        raise UnsupportedName(cls.__refusal__)

    def __getitem__(cls, item: Any) -> Any:
        return cls  # in an annotation

    def __iter__(cls) -> Any:
        raise UnsupportedName(cls.__refusal__)  # with __getitem__ alone a loop would never end


@cache
def _unsupported(name: str, instead: str) -> Any:
    """Return a class that stands for the foreign ``name``, such as ``"colossalai.fx.ColoTracer"``."""
    module, _, last = name.rpartition(".")
    message = f"{name}: {instead}"
    return _UnsupportedClass(last, (), {"__module__": module, "__doc__": message, "__refusal__": message})


class AliasFinder(MetaPathFinder, Loader):
    """Imports modules below ``table.home`` that are in the table and are not files."""

    def __init__(self, table: AliasTable) -> None:
        self.table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table.

        Raises:
            ModuleNotFoundError: neither a module nor a name of the table. ``from module import name`` comes here for an
                unknown name; Python's own message would only say that it cannot be imported.
        """
        if not fullname.startswith(f"{self.table.home}."):
            return None
        below = fullname.removeprefix(f"{self.table.home}.")
        if not self.table.has_module(below):
            module, _, name = below.rpartition(".")
            raise ModuleNotFoundError(_unknown(self.table, module, name))
        return ModuleSpec(fullname, self, origin=self.table.home, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a module that looks up its names in the table."""
        path = spec.name.removeprefix(f"{self.table.home}.")
        module = ModuleType(spec.name, f"Names of {self.table.full_name(path)}.")
        module.__getattr__ = partial(lookup, self.table, path)  # type: ignore[method-assign]
        module.__all__ = sorted({*self.table.names.get(path, {})} - {ANY_NAME})  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: such a module has no code."""


def install_aliases(table: AliasTable) -> Callable[[str], Any]:
    """Make the modules of ``table`` importable below their home package, and return the package's ``__getattr__``."""
    if not any(isinstance(each, AliasFinder) and each.table is table for each in sys.meta_path):
        sys.meta_path.append(AliasFinder(table))  # after the finder of files
    return partial(lookup, table, "")


def lookup(table: AliasTable, path: str, name: str) -> Any:
    """Return our object for ``name`` of the foreign module ``path``.

    Raises:
        AttributeError: the table does not have the name.
    """
    entry = table.find(path, name)
    if isinstance(entry, Alias):
        return getattr(import_module(entry.module), entry.name)
    if name.startswith("__"):  # Python looks these up in any module
        raise AttributeError(name)
    if entry is not None:
        return _unsupported(table.full_name(path, name), entry.instead)
    below = f"{path}.{name}".lstrip(".")
    if table.has_module(below):
        return import_module(f"{table.home}.{below}")
    raise AttributeError(_unknown(table, path, name))


def _unknown(table: AliasTable, path: str, name: str) -> str:
    return (
        f"{table.full_name(path)} has no name {name!r} in shardwise, whose names are those of {table.foreign} "
        f"{table.version}. Run `shardwise port FILE` to see what to do with each name of a program"
    )


# ---- our packages under a foreign library's name, for programs that are not changed at all


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
        """Return our module. Otherwise other threads would get an empty one from ``sys.modules`` during the import."""
        module = import_module(str(spec.origin))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec, which importlib replaced. The module has run already, under its own name."""
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
