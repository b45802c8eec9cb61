"""Faults on purpose, which the checks must detect: a method of the engine is replaced for a while."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

Patch = Callable[[], AbstractContextManager[Any]]


def broken(owner: Any, name: str) -> Callable[[Callable[..., Any]], Patch]:
    """Decorate a replacement, which is called with the original method before its arguments."""

    def decorate(function: Callable[..., Any]) -> Patch:
        real = getattr(owner, name)

        def replaced(*args: Any, **given: Any) -> Any:
            return function(real, *args, **given)

        return lambda: mock.patch.object(owner, name, replaced)

    return decorate
