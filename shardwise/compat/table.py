"""Alias tables: the names of a foreign library and where they are here, read from the TOML files of this folder.

The keys of a section are texts (or targets); the value is a table of foreign modules with lists of their names.

* ``[here."torch.nn:LayerNorm"]``: names that work: our module and, after a colon, our name if it differs. A leading dot
  stands for the home package.
* ``[differs."..."]``: what a program notices about a name that works.
* ``[absent."..."]``: unsupported names, and what to use instead. ``"*"`` stands for all other names of a module; alone
  in its module, for all modules below it too.
* ``[ignored."..."]``, ``[missing."..."]``: arguments of ``"module:name"`` or ``"module:Class.method"``.
* ``[values."..."]``: values of ``"module:name(argument=)"`` (``"*"``: any but None) that still mean the foreign
  library, and what to write instead; ``unless`` is an import after which the value means ours.

``{home}`` and ``{value}`` in a text stand for the home package and for the value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ANY_NAME = "*"
"""The entry that stands for all other names of a module."""
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
"""The foreign libraries, each with the home: our package that replaces it."""
SHARED = {
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
}
"""Libraries that are published under two names share a file."""


@dataclass(frozen=True)
class Alias:
    """A name that works: ``name`` of ``module`` in shardwise, imported at its first use. ``note`` has differences."""

    module: str
    name: str
    note: str = ""


@dataclass(frozen=True)
class Unsupported:
    """A name that does not work. ``instead`` continues a sentence that begins with the name and a colon."""

    instead: str


@dataclass(frozen=True)
class Value:
    """The replacement of a value of an argument, unless the program has the import ``unless``."""

    instead: str
    unless: str


Entry = Alias | Unsupported


@dataclass(frozen=True, kw_only=True, eq=False)
class AliasTable:
    """The names of another library.

    Attributes:
        foreign: top package of the library, such as ``"colossalai"``.
        home: our package that replaces it, such as ``"shardwise.colossalai"``.
        version: the release that has these names.
        names: the names of each module, which is a path below ``foreign`` (the empty text is the top).
        arguments: by ``"module:name"``, the arguments that are ``"ignored"``, with the reason, or ``"missing"``, with
            what to do instead.
        values: by ``"module:name(argument=)"``, what to write instead of a value.
        also: further dotted names of objects below ``foreign``, such as those of a package that exports them again.
        partial: the foreign library stays installed, and names that are not in the table are its own. Otherwise a name
            that is not in the table is missing.
    """

    foreign: str
    home: str
    version: str
    names: Mapping[str, Mapping[str, Entry]]
    arguments: Mapping[str, Mapping[str, tuple[str, str]]]
    values: Mapping[str, Mapping[str, Value]]
    also: Mapping[str, str]
    partial: bool

    def has_module(self, path: str) -> bool:
        """Return True if ``path`` is a module of the table, a parent of such a module, or below an unsupported
        module."""
        return self._has(path) or self.gone(path) is not None

    def gone(self, path: str) -> Entry | None:
        """Return the entry of the module ``path`` if it is unsupported as a whole."""
        while path and path not in self.names:
            path = path.rpartition(".")[0]
        entries = self.names.get(path, {})
        return entries[ANY_NAME] if entries.keys() == {ANY_NAME} else None

    def find(self, path: str, name: str) -> Entry | None:
        """Return the entry of a name of the module ``path``. Return ``None`` without an entry, or for a module."""
        entries = self.names.get(path, {})
        if name in entries or self._has(f"{path}.{name}".lstrip(".")):
            return entries.get(name)
        return entries.get(ANY_NAME) or self.gone(path)

    def _has(self, path: str) -> bool:
        return any(f"{each}.".startswith(f"{path}.") for each in self.names)

    def full_name(self, path: str, name: str = "") -> str:
        """Return the dotted foreign name, such as ``"colossalai.booster.Booster"``."""
        return ".".join(part for part in (self.foreign, path, name) if part)

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """Yield ``(module, name, entry)`` of every name."""
        return ((path, name, entry) for path, names in self.names.items() for name, entry in names.items())


@cache
def alias_table(foreign: str) -> AliasTable:
    """Return the table of the library ``foreign``, one of :data:`HOMES`."""
    file = Path(__file__).with_name(f"{SHARED.get(foreign, foreign)}.toml")
    return parse_table(foreign, HOMES[foreign], file.read_text("utf-8"))


def alias_tables() -> list[AliasTable]:
    """Return the tables of all libraries."""
    return [alias_table(foreign) for foreign in HOMES]


def parse_table(foreign: str, home: str, text: str) -> AliasTable:
    """Parse the text of a file."""
    table = tomllib.loads(text.replace("{home}", home))
    notes = {(path, name): note for note, path, name in _rows(table, "differs")}
    names: dict[str, dict[str, Entry]] = {}
    for target, path, name in _rows(table, "here"):
        module, _, other = target.partition(":")
        module = f"{home}{module}".rstrip(".") if module.startswith(".") else module
        names.setdefault(path, {})[name] = Alias(module, other or name, notes.get((path, name), ""))
    for instead, path, name in _rows(table, "absent"):
        names.setdefault(path, {})[name] = Unsupported(instead)
    arguments: dict[str, dict[str, tuple[str, str]]] = {}
    for section in ("ignored", "missing"):
        for reason, place, argument in _rows(table, section):
            arguments.setdefault(place, {})[argument] = section, reason
    values: dict[str, dict[str, Value]] = {}
    unless = {instead: rows.pop("unless", "") for instead, rows in table.get("values", {}).items()}
    for instead, place, value in _rows(table, "values"):
        values.setdefault(place, {})[value] = Value(instead.replace("{value}", value), unless[instead])
    also = {
        dotted: same.removeprefix(f"{foreign}.")
        for dotted, same in table.get("also", {}).items()
        if same.startswith(f"{foreign}.")
    }
    return AliasTable(
        foreign=foreign,
        home=home,
        version=table["version"],
        names=names,
        arguments=arguments,
        values=values,
        also=also,
        partial=table.get("partial", False),
    )


def _rows(table: Mapping[str, Any], section: str) -> Iterator[tuple[str, str, str]]:
    """Yield ``(key, module, name)`` of each name in a section."""
    for key, rows in table.get(section, {}).items():
        for place, names in rows.items():
            yield from ((key, place, name) for name in names)
