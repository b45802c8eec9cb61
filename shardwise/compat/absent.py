"""Names that can be imported and not used: they say what to do instead when a program comes to them."""

from __future__ import annotations

from abc import ABCMeta
from functools import cache
from typing import Any

__all__ = ["NotHere", "refusing"]


class NotHere(NotImplementedError, AttributeError):
    """A foreign name that cannot work was used; the message says what to do instead.

    It is an ``AttributeError`` as well, for programs that ask ``hasattr``.
    """


class _Refusing(ABCMeta):
    """Of classes that are never made. Programs import names that they use on some paths alone, ask ``isinstance`` of
    them, annotate with them and derive from them; a base may have a metaclass of its own, mostly ``ABCMeta``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotHere(cls.__refusal__)

    def __getattr__(cls, name: str) -> Any:
        # What Python and its tools ask of any class is not a use of this one.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise NotHere(cls.__refusal__)

    def __getitem__(cls, item: Any) -> Any:
        return cls  # an annotation

    def __iter__(cls) -> Any:
        raise NotHere(cls.__refusal__)  # else a loop would ask for items without an end

    __refusal__: str


@cache
def refusing(name: str, instead: str) -> Any:
    """A class that stands for the foreign ``name``, such as ``"colossalai.fx.ColoTracer"``."""
    module, _, last = name.rpartition(".")
    message = f"{name}: {instead}"
    return _Refusing(last, (), {"__module__": module, "__doc__": message, "__refusal__": message})
