"""Errors of what DeepSpeed asserts."""

from __future__ import annotations

__all__ = ["AssertedError"]


class AssertedError(ValueError, AssertionError):
    """A wrong use or value that DeepSpeed asserts, and programs catch so."""
