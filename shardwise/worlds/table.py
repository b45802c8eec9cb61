"""What a world's table says of a name and of an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["REST", "Absent", "Argument", "Entry", "Here", "Ignored", "Instead", "Renamed", "World"]

REST = "*"
"""Among the names of a module: all that are not in it, which cannot work either."""


@dataclass(frozen=True)
class Here:
    """A name that works.

    Attributes:
        module: ours, which has it; imported when the name is asked for.
        name: what it is called there; ``None``: the same.
        note: what differs, in a sentence; empty where a program notices nothing.
    """

    module: str
    name: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """A name, an argument, or (for a whole module) all that is in it and below it, which cannot work.

    Attributes:
        instead: what to do, as the rest of a sentence that begins with the name and a colon.
    """

    instead: str


@dataclass(frozen=True)
class Ignored:
    """An argument that is accepted and changes nothing; ``reason`` says why."""

    reason: str


@dataclass(frozen=True)
class Renamed:
    """An argument that is called ``to`` here."""

    to: str
    note: str = ""


@dataclass(frozen=True)
class Instead:
    """A value of an argument, mostly a text, by which a foreign library does what we do under another.

    Attributes:
        text: what to write, as the rest of a sentence that begins with the argument and a colon.
        unless: imports by which a program has made the value mean ours.
    """

    text: str
    unless: tuple[str, ...] = ()


Entry = Here | Absent
Argument = Ignored | Renamed | Absent


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """The names of one foreign library.

    Attributes:
        foreign: its top package, such as ``"colossalai"``.
        home: our package that takes its place, such as ``"shardwise.colossalai"``.
        version: the release that these are the names of.
        names: by module (its path below ``foreign``; the empty text is the top) the names in it, or :class:`Absent`
            for a module of which nothing can work. :data:`REST` stands for names beside those that are told.
        arguments: by ``"module:name"`` or ``"module:Class.method"`` what differs in the arguments of that.
        values: by ``"module:name"`` and argument what to write in place of a value, by its text; ``"*"``: of any.
        also: other dotted names of what is below ``foreign``, such as those of a package that shows it again.
        partial: names that are not in the table stay where they are, in the foreign library, which is installed beside
            ours. Otherwise a name that is not in the table is missing.
    """

    foreign: str
    home: str
    version: str
    names: Mapping[str, Mapping[str, Entry] | Absent]
    arguments: Mapping[str, Mapping[str, Argument]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Mapping[str, Instead]]] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False

    def has_module(self, path: str) -> bool:
        """Whether ``path`` is a module of the table, one above such a module, or below one that is absent whole."""
        below = f"{path}."
        return path in self.names or any(each.startswith(below) for each in self.names) or self.gone(path) is not None

    def gone(self, path: str) -> Absent | None:
        """What to do instead of all that is in the module ``path``, where nothing of it can work."""
        while path:
            entry = self.names.get(path)
            if entry is not None:
                return entry if isinstance(entry, Absent) else None
            path = path.rpartition(".")[0]
        return None

    def find(self, path: str, name: str) -> Entry | None:
        """What the table says of a name of the module ``path``; ``None``: nothing."""
        entries = self.names.get(path)
        if not isinstance(entries, Mapping):
            return self.gone(path)
        if name in entries or self.has_module(f"{path}.{name}".lstrip(".")):
            return entries.get(name)
        return entries.get(REST)

    def full_name(self, path: str, name: str = "") -> str:
        """Such as ``"colossalai.booster.Booster"``."""
        return ".".join(part for part in (self.foreign, path, name) if part)

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """``(module, name, entry)`` of every name; of a module that is absent whole it is :data:`REST`."""
        for path, names in self.names.items():
            if isinstance(names, Absent):
                yield path, REST, names
            else:
                yield from ((path, name, entry) for name, entry in names.items())
