"""Published arguments of a wrong type, found by their annotations where they are given."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from shardwise.checked import shown

__all__ = ["check_types", "fits"]

WORDS = {"bool": "True or False", "int": "a whole number", "float": "a number", "torch.dtype": "a torch.dtype"}


def check_types(published: type, arguments: Any, fractions: Collection[str] = (), own: Collection[str] = ()) -> None:
    """Whether each argument is what its annotation says, without a look at its value; what means the same becomes it.

    Args:
        published: the dataclass of the arguments.
        arguments: one of it.
        fractions: names that are annotated as whole numbers, as published, but may be fractions.
        own: names that are checked elsewhere.

    Raises:
        TypeError: naming the first argument that is not, its value, and what to give.
    """
    hints = get_type_hints(published)
    for field in fields(published):
        hint = float if field.name in fractions else hints[field.name]
        value = getattr(arguments, field.name)
        if field.name in own:
            continue
        if fits(value, hint):
            object.__setattr__(arguments, field.name, _same(value, hint))  # it is frozen
            continue
        kind, optional, _ = str(field.type).partition(" | None")
        word = "a number" if field.name in fractions else WORDS.get(kind, kind)
        raise TypeError(f"{field.name}={shown(value)}: give {word}{', or None' if optional else ''}")


def _same(value: Any, hint: Any) -> Any:
    """``value``, or the whole number or the switch that is asked for and means the same: 8 for 8.0 and numpy's 8."""
    if hint is bool:
        return bool(value)
    numbers = isinstance(value, Real) and not isinstance(value, bool)
    return int(value) if numbers and int in (hint, *get_args(hint)) and fits(value, int) else value


def fits(value: object, hint: Any) -> bool:
    """Whether ``value`` may be given where ``hint`` is asked for: 1.0 for a whole number, 0 and 1 for a switch, and any
    text, since those have names of their own to check."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in get_args(hint))
    if hint in (Any, str) or origin is Literal:
        return True
    if hint is bool:
        return isinstance(value, bool | np.bool_) or (isinstance(value, Integral) and value in (0, 1))
    if hint in (int, float):
        number = isinstance(value, Real) and not isinstance(value, bool)
        whole = isinstance(value, Integral) or (number and float(value).is_integer())  # type: ignore[arg-type]
        return number and (hint is float or whole)
    if hint is torch.device and isinstance(value, str):
        try:
            torch.device(value)
        except RuntimeError:
            return False
        return True
    return isinstance(value, origin or hint)
