"""Threads of one rank that use one model change what is gathered one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["in_turn"]


class _HasLock(Protocol):
    @property
    def lock(self) -> threading.RLock: ...


Self = TypeVar("Self", bound=_HasLock)
Args = ParamSpec("Args")
Result = TypeVar("Result")


def in_turn(method: Callable[Concatenate[Self, Args], Result]) -> Callable[Concatenate[Self, Args], Result]:
    """A method that holds its object's ``lock`` while it runs."""

    @wraps(method)
    def locked(self: Self, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked
