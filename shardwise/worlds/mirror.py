"""Modules of a foreign layout, made from a world's table when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from shardwise.worlds.absent import refusing
from shardwise.worlds.table import REST, Here, World

__all__ = ["Mirror", "mirror"]


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
        if self.world.has_module(below):
            return ModuleSpec(fullname, self, origin=self.world.home, is_package=True)
        if self._program(fullname) is not None:
            return ModuleSpec(fullname, self, origin=self.world.home)
        raise ModuleNotFoundError(unknown(self.world, *_parted(below)))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """One whose names are looked up in the table when they are asked for."""
        return Mirrored(spec.name, self.world)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run."""

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m``: what runs the module of ours that has the module's ``main``; ``None``: there is none."""
        program = self._program(fullname)
        if program is None:
            return None
        return compile(f"import runpy\nrunpy.run_module({program!r}, run_name='__main__')\n", fullname, "exec")

    def _program(self, fullname: str) -> str | None:
        path, name = _parted(fullname.removeprefix(f"{self.world.home}."))
        entry = self.world.names.get(path, {}).get("main") if name == "__main__" else None
        return entry.module if isinstance(entry, Here) else None


class Mirrored(ModuleType):
    """A module of a foreign layout."""

    def __init__(self, name: str, world: World) -> None:
        path = name.removeprefix(world.home).lstrip(".")
        super().__init__(name, f"Names of {world.full_name(path)}.")
        self._world, self._path = world, path

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return sorted({*self._world.names.get(self._path, {})} - {REST})
        found = lookup(self._world, self._path, name)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and "_path" in vars(self) and name in self._world.names.get(self._path, {}):
            return  # the import of a module that is called as a name here, which is what programs mean
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_listed(self._world, self._path)})


def mirror(world: World, also: Iterable[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``world`` importable below its home, from which this is called once.

    Args:
        world: the table.
        also: names that the home has itself.

    Returns:
        ``__getattr__`` and ``__dir__`` of the home.
    """
    if not any(isinstance(each, Mirror) and each.world.home == world.home for each in sys.meta_path):
        sys.meta_path.append(Mirror(world))  # after the one that finds files
    listed = sorted({*also, *_listed(world, "")})

    def __getattr__(name: str) -> Any:
        return lookup(world, "", name)

    return __getattr__, lambda: listed


def lookup(world: World, path: str, name: str) -> Any:
    """What ``name`` of the module ``path`` is here.

    Raises:
        AttributeError: the table does not have it.
    """
    names = world.names.get(path, {})
    if name.startswith("__") and name.endswith("__") and name not in names:
        raise AttributeError(name)
    below = f"{path}.{name}".lstrip(".")
    # A name may be called as the module that it is from: then the name is meant, as where a package binds both.
    entry = world.find(path, name) if name in names or below not in world.names else None
    if isinstance(entry, Here):
        return getattr(import_module(entry.module), entry.name)
    if entry is not None:
        return refusing(world.full_name(path, name), entry.instead)
    if world.has_module(below):
        return import_module(f"{world.home}.{below}")
    raise AttributeError(unknown(world, path, name))


def unknown(world: World, path: str, name: str) -> str:
    """What is said of a name that the table does not have."""
    return (
        f"{world.full_name(path)} has nothing of the name {name!r} in shardwise (its names are those of "
        f"{world.foreign} {world.version}): `shardwise port FILE` says of each name of a program what to do"
    )


def _listed(world: World, path: str) -> list[str]:
    """Names of the module and modules below it."""
    start = f"{path}." if path else ""
    below = {each.removeprefix(start).split(".")[0] for each in world.names if each.startswith(start) and each != path}
    return sorted({*world.names.get(path, {}), *below} - {"", REST})


def _parted(below: str) -> tuple[str, str]:
    path, _, name = below.rpartition(".")
    return path, name
