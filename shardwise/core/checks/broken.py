"""The broken state of a session: a change failed half-way, and the changed values must be loaded before other uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

PARAMETERS = "the model's parameters"


def state_of(optimizer: int) -> str:
    """Return the name of an optimizer's state among the parts."""
    return f"the state of optimizer {optimizer}"


# [Note: Broken sessions]
# A change of many values that stops in the middle (an exception in the user's optimizer, a disk that fails, a second
# Ctrl-C) is neither undone nor finished. Each part is marked before its first value changes, and the mark is removed
# after the last one. While a part is marked, forward passes, steps and saves raise; loading the part removes the mark.
# Replicas that find out that they made different steps mark their parts, too.
class Broken:
    """The parts of a session that a failed change left half-changed, the same on every rank.

    Args:
        roll_back: Drops what a failed change wrote to the disk.
    """

    def __init__(self, roll_back: Callable[[], None]) -> None:
        self._roll_back = roll_back
        self._reasons: dict[str, str] = {}
        """By part, the call that broke it."""

    def mark(self, by: str, *parts: str) -> None:
        """Note that ``by`` is about to change ``parts``. The first call that broke a part stays its reason."""
        for part in parts:
            self._reasons.setdefault(part, by)

    def loaded(self, *parts: str) -> None:
        """Note that all values of ``parts`` have been replaced."""
        for part in parts:
            self._reasons.pop(part, None)

    @contextmanager
    def replacing(self, by: str, parts: Sequence[str], partly: Collection[str] = ()) -> Iterator[None]:
        """Mark ``parts`` while the block replaces their values. If the block raises, they stay marked.

        Args:
            by: The call that replaces them.
            parts: What is replaced.
            partly: Those of which only some values are replaced: if they were broken before they remain so.
        """
        remaining = [part for part in partly if part in self._reasons]
        self.mark(by, *parts)
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self.loaded(*[part for part in parts if part not in remaining])

    def check(self, what: str) -> None:
        """Raise a RuntimeError if a part is broken, since ``what`` needs all of them."""
        if self._reasons:
            reasons = "; ".join(f"{part} by {by}" for part, by in self._reasons.items())
            raise RuntimeError(
                f"{what} after a change failed, or was made differently on the ranks, and left half-changed {reasons}: "
                "load a checkpoint, or the parts named here with load_state_dict(), before going on"
            )
