"""State machines: a table of allowed transitions, which changes are checked against and pictures are drawn from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)


class Table(Generic[S]):
    """The allowed transitions between the states of one kind of object.

    Args:
        what: the name of the kind, for messages (``"chunk"``).
        changes: for each state, the states that may follow, each with the reason.
    """

    def __init__(self, what: str, changes: Mapping[S, Mapping[S, str]]) -> None:
        self.what, self._changes = what, changes

    def check(self, index: int, old: S, new: S) -> None:
        """Check that the object with number ``index`` may go from ``old`` to ``new``.

        Raises:
            RuntimeError: the change is not allowed. The message has the object, both states and the caller (two calls
                up).
        """
        if new not in self._changes[old]:
            code = sys._getframe(2).f_code
            allowed = ", ".join(state.name for state in self._changes[old]) or "nothing"
            raise RuntimeError(
                f"{self.what} {index} is {old.name} and cannot become {new.name} (only {allowed}), which "
                f"{code.co_qualname} wants; report this"
            )

    def __iter__(self) -> Iterator[tuple[S, S, str]]:
        """Yield every transition in the order of the table: from, to, reason."""
        for old, changes in self._changes.items():
            for new, why in changes.items():
                yield old, new, why
