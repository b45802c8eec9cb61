"""What was being changed when it was interrupted, and must be loaded before anything goes on."""

from __future__ import annotations

__all__ = ["PARAMETERS", "Unfinished", "state_of"]

PARAMETERS = "the model's parameters"


def state_of(optimizer: int) -> str:
    """The name of an optimizer's state among the parts."""
    return f"the state of optimizer {optimizer}"


class Unfinished:
    """Parts of a run that are neither those before a change nor those after it.

    A part is noted down before its first value changes and struck off when the last one has, so that an interrupt at
    any point between (Ctrl-C, an exception in the user's optimizer) leaves it here.
    """

    def __init__(self) -> None:
        self._by: dict[str, str] = {}
        """By part, what began to change it."""

    def begin(self, by: str, *parts: str) -> None:
        """``by`` is about to change ``parts``."""
        for part in parts:
            self._by.setdefault(part, by)

    def end(self, *parts: str) -> None:
        """They are whole again."""
        for part in parts:
            self._by.pop(part, None)

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
                f"{what}: an update was interrupted and has left half-changed {left}: load a checkpoint, or what is "
                "named here by load_state_dict(), before going on"
            )
