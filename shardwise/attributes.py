"""Attributes that a wrapper takes from what it wraps, with an error that names both where neither has one."""

from __future__ import annotations

from typing import Any

__all__ = ["attribute_of"]


def attribute_of(wrapped: object, name: str, wrapper: object) -> Any:
    """``wrapped.name``, for the ``__getattr__`` of ``wrapper``.

    Raises:
        AttributeError: neither has it; the user, who made ``wrapped``, is not told that it is to blame.
    """
    try:
        return getattr(wrapped, name)
    except AttributeError as error:
        own = type(wrapper).__name__
        raise AttributeError(
            f"{own} has no attribute {name!r}, nor has the {type(wrapped).__name__} in it", name=name, obj=wrapper
        ) from error
