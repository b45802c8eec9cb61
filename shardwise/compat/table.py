"""What a world's table says of names and arguments, read from the TOML file beside this module.

Each section of a file has one shape: under what is said, the foreign modules with the names that it is said of.

* ``[here."torch.nn:LayerNorm"]``: where the names are: a module of ours, and behind a colon what they are called there.
  A dot at the beginning stands for the world's home.
* ``[differs."..."]``: of names that are here, what a program notices.
* ``[absent."..."]``: names that cannot work, and what to do instead. ``"*"`` stands for all names of a module that are
  not told; alone in its module, for all modules below it, too.
* ``[ignored."..."]``, ``[refused."..."]``: arguments of ``"module:name"`` or ``"module:Class.method"``.
* ``[values."..."]``: values of ``"module:name(argument=)"`` (``"*"``: any but None) by which the foreign library does
  what we do under another, with what to write instead; ``unless`` is an import that makes the value mean ours.

``{home}`` and ``{value}`` in a text stand for the world's home and for the value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["HOMES", "REST", "Absent", "Entry", "Here", "Value", "World", "all_worlds", "parse_world", "read_world"]

REST = "*"
"""Among the names of a module: all that are not in it, which cannot work either."""
HOMES: Mapping[str, str] = {
    "colossalai": "shardwise.colossalai",
    "deepspeed": "shardwise.deepspeed",
    "transformers": "shardwise.huggingface",
    "accelerate": "shardwise.huggingface",
    "lightning.pytorch": "shardwise.lightning",
    "pytorch_lightning": "shardwise.pytorch_lightning",
    "lightning.fabric": "shardwise.fabric",
    "lightning_fabric": "shardwise.lightning_fabric",
    "lightning_colossalai": "shardwise.lightning_colossalai",
}
"""The foreign libraries, each with our package that takes its place."""
SHARED = {
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
}
"""Files of libraries that are published under two names."""


@dataclass(frozen=True)
class Here:
    """A name that works: ``name`` of our ``module``, imported when it is asked for; ``note`` says what differs."""

    module: str
    name: str
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """A name or an argument that cannot work; ``instead`` goes on a sentence that begins with it and a colon."""

    instead: str


@dataclass(frozen=True)
class Value:
    """What to write in place of a value of an argument, unless the program has an import that makes the value ours."""

    instead: str
    unless: str


Entry = Here | Absent


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """The names of one foreign library.

    Attributes:
        foreign: its top package, such as ``"colossalai"``.
        home: our package that takes its place, such as ``"shardwise.colossalai"``.
        version: the release that these are the names of.
        names: by module (its path below ``foreign``; the empty text is the top) the names in it.
        ignored: by ``"module:name"`` arguments that change nothing, each with the reason.
        refused: the same of arguments that cannot work, with what to do instead.
        values: by ``"module:name(argument=)"`` what to write in place of a value.
        also: other dotted names of what is below ``foreign``, such as those of a package that shows it again.
        partial: names that are not in the table stay where they are, in the foreign library, which is installed beside
            ours. Otherwise a name that is not in the table is missing.
    """

    foreign: str
    home: str
    version: str
    names: Mapping[str, Mapping[str, Entry]]
    ignored: Mapping[str, Mapping[str, str]]
    refused: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Mapping[str, Value]]
    also: Mapping[str, str]
    partial: bool

    def has_module(self, path: str) -> bool:
        """Whether ``path`` is a module of the table, one above such a module, or below one that is absent whole."""
        return self._tells(path) or self.gone(path) is not None

    def gone(self, path: str) -> Entry | None:
        """What to do instead of all that is in the module ``path``, where nothing of it can work."""
        while path and path not in self.names:
            path = path.rpartition(".")[0]
        entries = self.names.get(path, {})
        return entries[REST] if entries.keys() == {REST} else None

    def find(self, path: str, name: str) -> Entry | None:
        """What the table says of a name of the module ``path``; ``None``: nothing, or that it is a module."""
        entries = self.names.get(path, {})
        if name in entries or self._tells(f"{path}.{name}".lstrip(".")):
            return entries.get(name)
        return entries.get(REST) or self.gone(path)

    def _tells(self, path: str) -> bool:
        return any(f"{each}.".startswith(f"{path}.") for each in self.names)

    def full_name(self, path: str, name: str = "") -> str:
        """Such as ``"colossalai.booster.Booster"``."""
        return ".".join(part for part in (self.foreign, path, name) if part)

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """``(module, name, entry)`` of every name."""
        return ((path, name, entry) for path, names in self.names.items() for name, entry in names.items())


@cache
def read_world(foreign: str) -> World:
    """The world of the library ``foreign``, one of :data:`HOMES`."""
    file = Path(__file__).with_name(f"{SHARED.get(foreign, foreign)}.toml")
    return parse_world(foreign, HOMES[foreign], file.read_text("utf-8"))


def all_worlds() -> list[World]:
    """Of all libraries."""
    return [read_world(foreign) for foreign in HOMES]


def parse_world(foreign: str, home: str, text: str) -> World:
    """A world from the text of its file."""
    table = tomllib.loads(text.replace("{home}", home))
    notes = {(path, name): note for note, path, name in _rows(table, "differs")}
    names: dict[str, dict[str, Entry]] = {}
    for target, path, name in _rows(table, "here"):
        module, _, other = target.partition(":")
        module = f"{home}{module}".rstrip(".") if module.startswith(".") else module
        names.setdefault(path, {})[name] = Here(module, other or name, notes.get((path, name), ""))
    for instead, path, name in _rows(table, "absent"):
        names.setdefault(path, {})[name] = Absent(instead)
    said: dict[str, dict[str, dict[str, str]]] = {"ignored": {}, "refused": {}}
    for section, arguments in said.items():
        for reason, place, argument in _rows(table, section):
            arguments.setdefault(place, {})[argument] = reason
    values: dict[str, dict[str, Value]] = {}
    unless = {instead: rows.pop("unless", "") for instead, rows in table.get("values", {}).items()}
    for instead, place, value in _rows(table, "values"):
        values.setdefault(place, {})[value] = Value(instead.replace("{value}", value), unless[instead])
    also = {
        dotted: same.removeprefix(f"{foreign}.")
        for dotted, same in table.get("also", {}).items()
        if same.startswith(f"{foreign}.")
    }
    return World(
        foreign=foreign,
        home=home,
        version=table["version"],
        names=names,
        values=values,
        also=also,
        partial=table.get("partial", False),
        **said,
    )


def _rows(table: Mapping[str, Any], section: str) -> Iterator[tuple[str, str, str]]:
    """``(what is said, module, name)`` of each name in a section."""
    for said, rows in table.get(section, {}).items():
        for place, names in rows.items():
            yield from ((said, place, name) for name in names)
