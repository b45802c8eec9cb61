"""Published arguments that stand in one dataclass each: their values and texts wherever else they are shown.

A class that others published is reproduced with their names, order and defaults. Where its arguments are data of a
dataclass, values, annotations and descriptions are taken from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

__all__ = ["documented", "names_of", "picked"]

C = TypeVar("C", bound=type)
A = TypeVar("A")
SECTIONS = ("Args:", "Attributes:")


def names_of(arguments: type) -> tuple[str, ...]:
    """The names of a dataclass's fields, in order."""
    return tuple(each.name for each in fields(arguments))


def picked(arguments: type[A], given: Mapping[str, Any]) -> A:
    """The dataclass ``arguments`` of those in ``given`` that are its fields; others have their defaults."""
    return arguments(**{name: given[name] for name in names_of(arguments) if name in given})


def documented(*sources: type) -> Callable[[C], C]:
    """A class's docstring gets the texts of all its arguments, in the order of its signature.

    What its own docstring does not describe comes from its bases and from ``sources``. (``python -OO`` has no texts.)
    Of a dataclass the annotations in the signature become types: as texts they would be looked up in the module of the
    class alone, which need not know the names that its bases' fields are annotated with.
    """

    def change(cls: C) -> C:
        if is_dataclass(cls):
            kinds = get_type_hints(cls)
            cls.__init__.__annotations__ = {name: kinds[name] for name in names_of(cls)} | {"return": None}
        if cls.__doc__:
            found: dict[str, list[str]] = {}
            for each in (*cls.__mro__[1:], *(base for source in sources for base in source.__mro__)):
                found = _split(each.__doc__ or "")[1] | found
            before, own, after = _split(cls.__doc__)
            found |= own
            entries = [line for name in inspect.signature(cls).parameters for line in found.get(name, ())]
            cls.__doc__ = "\n".join([*before, *entries, *after])
        return cls

    return change


def _split(doc: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """The lines up to where arguments are described, those of each argument by name, and the lines after them."""
    lines = inspect.cleandoc(doc).splitlines()
    start = next((number + 1 for number, line in enumerate(lines) if line in SECTIONS), len(lines))
    entries: dict[str, list[str]] = {}
    end = start
    for line in lines[start:]:
        if not line.startswith("    "):
            break
        if line[4] != " ":
            name = line.strip().partition(":")[0]
        entries.setdefault(name, []).append(line)
        end += 1
    return lines[:start], entries, lines[end:]
