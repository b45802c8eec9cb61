"""The one exception that the command line turns into a one-line message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["BadInput", "option"]


class BadInput(Exception):
    """Something the user gave cannot be used; the text says what and what to do. Exit status 2, no traceback."""


def option(flag: str, check: Callable[..., Any], value: object, *bounds: Any, **more: Any) -> Any:
    """``check(flag, value, ...)`` of :mod:`shardwise.checked`, for an option of the command line.

    Raises:
        BadInput: what it says, with the option as it is typed.
    """
    try:
        return check(flag, value, *bounds, **more)
    except (TypeError, ValueError) as problem:
        raise BadInput(str(problem).replace("=", " ", 1)) from None
