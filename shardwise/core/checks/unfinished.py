"""What was being changed when it was interrupted, or was changed otherwise on other ranks, and must be loaded before
anything goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["PARAMETERS", "Unfinished", "state_of"]

PARAMETERS = "the model's parameters"


def state_of(optimizer: int) -> str:
    """The name of an optimizer's state among the parts."""
    return f"the state of optimizer {optimizer}"


# [Note: What an interrupt leaves half-done]
# A change of many values that is stopped in the middle (by a second Ctrl-C, or by an exception in the user's optimizer)
# can be neither undone nor finished. So each part is noted before its first value changes and struck off after the
# last. Forward passes, steps and saves refuse to run while a part is noted; loading that part strikes it off. A
# second Ctrl-C in step() notes the parts of the step even if a disk could restore them. Of two nested changes the outer
# one strikes the part off. If replicas find that they made different steps, their parts are noted as well.
class Unfinished:
    """Parts of a run that are neither those before a change nor those after it, on all ranks alike.

    A part is noted down before its first value changes and struck off when the last one has, so that an interrupt at
    any point between (Ctrl-C, an exception in the user's optimizer) leaves it here.
    """

    def __init__(self) -> None:
        self._by: dict[str, str] = {}
        """By part, what began to change it."""

    def begin(self, by: str, *parts: str) -> None:
        """``by`` is about to change ``parts``."""
        for part in parts:
            # Who left it first is told; a load that is interrupted, too, is not the cause.
            self._by.setdefault(part, by)

    def end(self, *parts: str) -> None:
        """They are whole again."""
        for part in parts:
            self._by.pop(part, None)

    @contextmanager
    def replaced(self, by: str, parts: Sequence[str], partly: Collection[str] = ()) -> Iterator[None]:
        """Inside the block ``by`` gives ``parts`` other values, and some of ``partly``, which are among them.

        What raises there says itself what it leaves; an interrupt says nothing, so all of them are unfinished then.
        """
        new = [part for part in parts if part not in self]
        self.begin(by, *parts)
        try:
            yield
        except Exception:
            self.end(*new)
            raise
        self.end(*[part for part in parts if part in new or part not in partly])

    def __contains__(self, part: str) -> bool:
        return part in self._by

    def check(self, what: str) -> None:
        """``what`` needs all parts.

        Raises:
            RuntimeError: some were left half-changed.
        """
        if self._by:
            left = "; ".join(f"{part} by {by}" for part, by in self._by.items())
            raise RuntimeError(
                f"{what}: an update was interrupted, or made differently on the ranks, and has left half-changed {left}"
                ": load a checkpoint, or what is named here by load_state_dict(), before going on"
            )
