"""The one exception that the command line turns into a one-line message."""

from __future__ import annotations

__all__ = ["BadInput"]


class BadInput(Exception):
    """Something the user gave cannot be used; the text says what and what to do. Exit status 2, no traceback."""
