"""Published arguments of a wrong type, found by their annotations where they are given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from shardwise.core.base.checked import shown
from shardwise.core.base.remarks import warn_user

__all__ = ["check_types", "fits", "two_orders"]

C = TypeVar("C", bound=type)

WORDS = {"bool": "True or False", "int": "a whole number", "float": "a number", "torch.dtype": "a torch.dtype"}


NAMED = 4
"""Arguments that a message shows of many."""


def two_orders(gone: str) -> Callable[[C], C]:
    """Arguments by position from ``gone`` on, which ColossalAI 0.4.4 has and 0.5.0 has not, are taken as 0.4.4's, and a
    warning says what 0.5.0 takes them for."""

    def change(cls: C) -> C:
        init: Callable[..., None] = cls.__init__  # type: ignore[misc]
        parameters = list(inspect.signature(init).parameters.values())[1:]
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        common = names.index(gone)

        @functools.wraps(init)
        def called(self: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) > common:
                older, newer = (
                    ", ".join(f"{name}={shown(value)}" for name, value in zip(order, args[common:], strict=False))
                    for order in (names[common : common + NAMED], names[common + 1 : common + 1 + NAMED])
                )
                warn_user(
                    f"{cls.__name__} with {len(args)} arguments by position: from the {common + 1}th on they are taken "
                    f"in the order of ColossalAI 0.4.4 ({older}, ...); 0.5.0 has no {gone} and takes them for {newer}, "
                    "... Give them by name"
                )
            init(self, *args, **kwargs)

        cls.__init__ = called  # type: ignore[misc]
        return cls

    return change


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
