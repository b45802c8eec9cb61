"""Enumerated states: what may become what is said once, in a table that every change is held against and drawn from.

A state says what may be relied on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["Table"]

S = TypeVar("S", bound=Enum)


class Table(Generic[S]):
    """What the states of one kind of thing may become.

    Args:
        what: what a message calls the thing (``"chunk"``).
        changes: for every state, the states that it may become, each with the reason why it does; the first state of
            the enumeration is the one that a thing begins in.

    Raises:
        ValueError: a state is missing, or no sequence of changes leads to it.
    """

    def __init__(self, what: str, changes: Mapping[S, Mapping[S, str]]) -> None:
        self.what, self._changes = what, changes
        states = type(next(iter(changes)))
        reached, new = set[S](), {next(iter(states))}
        while new:
            reached |= new
            new = {after for state in new for after in changes.get(state, ())} - reached
        if lost := [state.name for state in states if state not in changes or state not in reached]:
            raise ValueError(f"the table of a {what} has no way to or from {', '.join(lost)}: add it to changes")

    def check(self, index: int, old: S, new: S) -> None:
        """The thing with number ``index`` may go from ``old`` to ``new``.

        Raises:
            RuntimeError: it may not; the message names the thing, both states and who asked (two calls up).
        """
        if new not in self._changes[old]:
            code = sys._getframe(2).f_code
            allowed = ", ".join(state.name for state in self._changes[old]) or "nothing"
            raise RuntimeError(
                f"{self.what} {index} is {old.name} and cannot become {new.name} (only {allowed}), which "
                f"{code.co_qualname} wants; report this"
            )

    def __iter__(self) -> Iterator[tuple[S, S, str]]:
        """Every change, in the order of the table: from, to, why."""
        for old, changes in self._changes.items():
            for new, why in changes.items():
                yield old, new, why
