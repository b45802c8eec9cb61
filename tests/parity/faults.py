"""Faults on purpose, which the checks must notice: a method of the engine that is another one for a while."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

Patch = Callable[[], AbstractContextManager[Any]]


def broken(owner: Any, name: str) -> Callable[[Callable[..., Any]], Patch]:
    """Of a function that is called with the real one before its arguments: what puts it in the place of that one."""

    def decorate(function: Callable[..., Any]) -> Patch:
        real = getattr(owner, name)

        def replaced(*args: Any, **given: Any) -> Any:
            return function(real, *args, **given)

        return lambda: mock.patch.object(owner, name, replaced)

    return decorate
