"""Docstrings as the API reference shows them: an extension of griffe, which reads them for MkDocs without running code.

They are written for who reads the code: with references such as ``:class:`Plan```, with one line for several arguments
alike, and with arguments that stand in a dataclass of their own, from which a class gets them when it is made.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import is_dataclass
from typing import Any

import griffe

__all__ = ["Docstrings", "apart", "plain"]

COMPOSED = ("shardwise.booster.plugin.", "shardwise.strategies.")
"""Where classes get texts of their arguments when they are made (shardwise/compat/arguments.py)."""
SECTION = re.compile(r"^(?:Args|Attributes):\n(?:(?:    .*)?(?:\n|\Z))+", re.MULTILINE)


def plain(text: str) -> str:
    """References to other names are these names; those to notes in the code are left out."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", re.sub(r"\s*See \[Note: [^\]]*\]\.", "", text))


def apart(text: str) -> str:
    """Each argument has an entry of its own, also where several share one."""
    entry = re.compile(r"^( {4,})(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)
    return entry.sub(lambda found: "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", ")), text)


def _composed(path: str) -> str:
    """The docstring that a class has at run time, with the arguments of the dataclass that it inherits."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    text = inspect.cleandoc(cls.__doc__ or "")
    if SECTION.search(text) is None:
        texts = (inspect.cleandoc(base.__doc__ or "") for base in cls.__mro__[1:] if is_dataclass(base))
        found = next((match[0] for match in map(SECTION.search, texts) if match is not None), "")
        text = f"{text}\n\n{found}"
    return text


class Docstrings(griffe.Extension):
    """Changes docstrings once all of them are known."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if obj.is_class and obj.path.startswith(COMPOSED):
            text = _composed(obj.path)
        obj.docstring.value = apart(plain(text))
