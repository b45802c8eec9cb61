"""Published arguments as the fields of a dataclass: their names, and which of them were changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

A = TypeVar("A")


def names_of(arguments: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, in order."""
    return tuple(each.name for each in fields(arguments))


def picked(arguments: type[A], values: Mapping[str, Any]) -> A:
    """Return the dataclass ``arguments`` with the entries of ``values`` that are its fields."""
    return arguments(**{name: values[name] for name in names_of(arguments) if name in values})


def changed(arguments: Any, names: Iterable[str]) -> list[str]:
    """Return the ``names`` of fields that differ from their defaults, each once."""
    defaults = {each.name: each.default for each in fields(arguments)}
    return [name for name in dict.fromkeys(names) if getattr(arguments, name) != defaults[name]]


def unused_arguments(arguments: Any, reasons: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return the arguments in ``reasons``, by reason, that differ from their defaults."""
    result = {reason: changed(arguments, names) for reason, names in reasons.items()}
    return {reason: names for reason, names in result.items() if names}


def listed(arguments: Any, names: Iterable[str]) -> str:
    """Return a text such as ``"stage=3, pin_memory=True"``."""
    return ", ".join(f"{name}={getattr(arguments, name)!r}" for name in names)
