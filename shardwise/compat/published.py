"""Published arguments that stand in one dataclass each: their signatures and texts wherever else they are shown.

A class that others published is reproduced with their names, order and defaults. Where its arguments are data of a
dataclass, values, annotations and descriptions are taken from there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any, TypeVar, get_type_hints

__all__ = ["changed", "documented", "given_in_vain", "listed", "names_of", "picked", "takes"]

C = TypeVar("C", bound=type)
A = TypeVar("A")
SECTIONS = ("Args:", "Attributes:")


def names_of(arguments: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, in order."""
    return tuple(each.name for each in fields(arguments))


def picked(arguments: type[A], given: Mapping[str, Any]) -> A:
    """Return the dataclass ``arguments`` with the entries of ``given`` that are its fields."""
    return arguments(**{name: given[name] for name in names_of(arguments) if name in given})


def changed(arguments: Any, names: Iterable[str]) -> list[str]:
    """Return the ``names`` of fields that differ from their defaults, each once."""
    defaults = {each.name: each.default for each in fields(arguments)}
    return [name for name in dict.fromkeys(names) if getattr(arguments, name) != defaults[name]]


def given_in_vain(arguments: Any, reasons: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return the arguments in ``reasons``, by reason, that differ from their defaults."""
    found = {reason: changed(arguments, names) for reason, names in reasons.items()}
    return {reason: names for reason, names in found.items() if names}


def listed(arguments: Any, names: Iterable[str]) -> str:
    """Return a text such as ``"stage=3, pin_memory=True"``."""
    return ", ".join(f"{name}={getattr(arguments, name)!r}" for name in names)


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


def takes(*order: str, by_name: Sequence[str] = ()) -> Callable[[C], C]:
    """The class is called with the fields of the dataclasses that its ``__init__`` takes.

    A parameter of ``__init__`` that is annotated with a dataclass stands for that one's fields; any other for itself.
    What ``inspect.signature`` shows, and who asks for it (an IDE at run time, a command line that is made of
    signatures), is a function with these arguments.

    Args:
        order: names of the arguments that may be given by position. Fields that are named nowhere keep their defaults.
        by_name: names of those that are given by name only.
    """

    def change(cls: C) -> C:
        init: Callable[..., None] = cls.__init__  # type: ignore[misc]
        hints = get_type_hints(init)
        own = list(inspect.signature(init).parameters.values())[1:]
        parts = {each.name: hints[each.name] for each in own if is_dataclass(hints[each.name])}
        found = {each.name: (hints[each.name], each.default) for each in own if each.name not in parts}
        for part in parts.values():
            kinds = get_type_hints(part)
            found |= {each.name: (kinds[each.name], each.default) for each in fields(part)}
        record = _record(cls.__name__, order, by_name, found)

        @functools.wraps(init)
        def called(self: Any, *args: Any, **kwargs: Any) -> None:
            given = vars(record(*args, **kwargs))
            rest = {each.name: given[each.name] for each in own if each.name not in parts}
            init(self, **{name: picked(part, given) for name, part in parts.items()}, **rest)

        called.__signature__ = inspect.signature(record.__init__)  # type: ignore[attr-defined, misc]
        called.__annotations__ = dict(record.__init__.__annotations__)  # type: ignore[misc]
        cls.__init__ = called  # type: ignore[misc]
        return cls

    return change


def _record(name: str, order: Iterable[str], by_name: Sequence[str], found: Mapping[str, tuple[Any, Any]]) -> type:
    """A dataclass whose ``__init__`` has the arguments, and the errors of a function that has them."""
    chosen = [(each, *found[each], False) for each in order] + [(each, *found[each], True) for each in by_name]
    return make_dataclass(
        name, [(each, kind, field(default=default, kw_only=only)) for each, kind, default, only in chosen]
    )
