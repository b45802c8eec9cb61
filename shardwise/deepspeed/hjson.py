"""Texts of configurations: JSON, and Hjson, which people write by hand (comments, commas and quotes left out).

Source: the syntax at hjson.github.io, but for texts of several lines, which no key wants. It is a page of code, so that
no package is needed for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["parse"]

DEEPEST = 100
"""Blocks inside each other."""
_SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_QUOTED = {mark: re.compile(rf"{mark}((?:[^{mark}\\\n]|\\.)*){mark}") for mark in "\"'"}
_KEY = re.compile(r"[^\s{}\[\],:'\"]+")
_WORD_ENDS = re.compile(r"[,}\]#\n]|//|/\*|$")
_WORDS = {"true": True, "false": False, "null": None}


def parse(text: str) -> Any:
    """The value of a JSON or Hjson text.

    Raises:
        ValueError: it is neither; a key stands twice in one block; it is more than 100 blocks deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError:
        return _Reader(text.lstrip("\ufeff")).whole()
    except RecursionError:
        raise ValueError(f"blocks are more than {DEEPEST} deep") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} stands twice in one block of the configuration; remove one of them")
        found[name] = value
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def whole(self) -> Any:
        found = self._value() if self._next() in ("{", "[") else self._members("")
        if self._next():
            raise self._fault("nothing more")
        return found

    def _fault(self, wanted: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - self._text.rfind("\n", 0, self._at)
        found = self._text[self._at : self._at + 20] or "the end"
        return ValueError(f"neither JSON nor Hjson: {wanted} is expected at line {line} column {column}, not {found!r}")

    def _next(self) -> str:
        """The character behind white space and comments; empty at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match is not None else self._at
        return self._text[self._at : self._at + 1]

    def _taken(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._fault(wanted)
        self._at = match.end()
        return match

    def _value(self) -> Any:
        first = self._next()
        if first in ("{", "["):
            self._at, self._depth = self._at + 1, self._depth + 1
            if self._depth > DEEPEST:
                raise ValueError(f"blocks are more than {DEEPEST} deep")
            found = self._members("}") if first == "{" else self._items()
            self._depth -= 1
            return found
        if self._text.startswith("'''", self._at):
            raise self._fault("a text of one line")
        if first in _QUOTED:
            return self._quoted(first)
        return self._word()

    def _members(self, end: str) -> dict[str, Any]:
        pairs = []
        while (first := self._next()) != end:
            name = self._quoted(first) if first in _QUOTED else self._taken(_KEY, "a key").group()
            if self._next() != ":":
                raise self._fault("':'")
            self._at += 1
            pairs.append((name, self._value()))
            self._comma()
        self._at += len(end)
        return _pairs(pairs)

    def _items(self) -> list[Any]:
        found = []
        while (first := self._next()) != "]":
            if not first:
                raise self._fault("']'")
            found.append(self._value())
            self._comma()
        self._at += 1
        return found

    def _comma(self) -> None:
        if self._next() == ",":
            self._at += 1

    def _quoted(self, mark: str) -> str:
        inner = self._taken(_QUOTED[mark], f"a text that ends with {mark}").group(1)
        if mark == "'":
            inner = re.sub(r"\\.|\"", lambda m: {"\\'": "'", '"': '\\"'}.get(m.group(), m.group()), inner)
        try:
            return str(json.loads(f'"{inner}"', strict=False))
        except json.JSONDecodeError as error:
            raise ValueError(f"the text {inner!r:.80} of the configuration: {error.msg}") from None

    def _word(self) -> Any:
        """A number, ``true``, ``false``, ``null``, or a text without quotes, which goes to the end of its line."""
        if self._next() in ("", "}", "]", ",", ":") or self._text.startswith("/*", self._at):
            raise self._fault("a value")
        for end in _WORD_ENDS.finditer(self._text, self._at):
            word = self._text[self._at : end.start()].strip()
            is_number = _NUMBER.fullmatch(word) is not None
            if is_number or word in _WORDS or end.group() in ("\n", ""):
                self._at = end.start()
                return json.loads(word) if is_number else _WORDS.get(word, word)
        raise self._fault("a value")
