"""The one exception that the command line turns into a one-line message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["BadInput", "check_writable", "option", "writing"]


class BadInput(Exception):
    """Something the user gave cannot be used; the text says what and what to do. Exit status 2, no traceback."""


def option(flag: str, check: Callable[..., Any], value: object, *bounds: Any, **more: Any) -> Any:
    """``check(flag, value, ...)`` of :mod:`shardwise.core.base.validate`, for an option of the command line.

    Raises:
        BadInput: what it says, with the option as it is typed.
    """
    try:
        return check(flag, value, *bounds, **more)
    except (TypeError, ValueError) as problem:
        raise BadInput(str(problem).replace("=", " ", 1)) from None


def check_writable(path: Path) -> None:
    """Before the work whose result is to be written there.

    Raises:
        BadInput: it is a folder, or in none that exists.
    """
    with writing(path):
        if path.is_dir() or not path.parent.is_dir():
            raise BadInput(f"{path}: cannot be written: give a file in a folder that exists")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the system name the file that was asked for, not one beside it, or none.

    Raises:
        BadInput: it cannot be written.
    """
    try:
        yield
    except OSError as problem:
        raise BadInput(f"{path}: cannot be written: {problem.strerror or problem}") from None
