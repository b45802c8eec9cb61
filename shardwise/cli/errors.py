"""The one exception that the command line turns into a one-line message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class BadInput(Exception):
    """The user's input is invalid; the text says what is wrong and what to do. Exit status 2, no traceback."""


def option(flag: str, check: Callable[..., Any], value: object, *bounds: Any, **more: Any) -> Any:
    """Return ``check(flag, value, ...)`` of :mod:`shardwise.core.base.validate` for a command-line option.

    Raises:
        BadInput: the check failed; the message has the option as it is typed.
    """
    try:
        return check(flag, value, *bounds, **more)
    except (TypeError, ValueError) as problem:
        raise BadInput(str(problem).replace("=", " ", 1)) from None


def check_writable(path: Path) -> None:
    """Check that the result can be written, before long work starts.

    Raises:
        BadInput: the path is a folder, or its folder does not exist.
    """
    with writing(path):
        if path.is_dir() or not path.parent.is_dir():
            raise BadInput(f"{path}: cannot be written: give a file in a folder that exists")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the system inside into errors that name ``path`` and no temporary file.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        yield
    except OSError as problem:
        raise BadInput(f"{path}: cannot be written: {problem.strerror or problem}") from None
