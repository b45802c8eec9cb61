"""Modules with the layout of a foreign library, made from its alias table when they are imported."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shardwise.compat.table import ANY_NAME, Alias, AliasTable

__all__ = ["AliasFinder", "UnsupportedName", "install_aliases", "lookup"]


class UnsupportedName(NotImplementedError, AttributeError):
    """An unsupported foreign name was used; the message says what to do instead.

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
    """Make the modules of ``table`` importable below its home; return the ``__getattr__`` of the home package."""
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
