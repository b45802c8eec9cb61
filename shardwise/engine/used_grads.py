"""Gradients that a step has used up, and that the program goes on as if they were still there."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.reduce.grads import ChunkGrads
from shardwise.remarks import warn_user

__all__ = ["UsedGrads"]


# [Note: A step uses gradients up]
# In plain PyTorch gradients stay until zero_grad(): a program without it adds the next pass's to them, or takes the
# same step twice. Here the step has used them, since updates during backward have when they are made, and a mean over
# passes or tokens has no meaning across a step. The result differs where such a program steps again, so that is where
# it is told: not in the pass before, whose gradients zero_grad() may still drop (two losses, one network).
class UsedGrads:
    """By optimizer, the parameters whose gradient a step has used, and no ``zero_grad()`` has dropped since."""

    def __init__(self) -> None:
        self._left: dict[int, set[int]] = {}
        self._told = False

    def note(self, optimizer: int, states: Iterable[ChunkGrads]) -> None:
        """A step of ``optimizer`` is about to drop the gradients in ``states``."""
        if not self._told:
            left = self._left.setdefault(optimizer, set())
            left.update(state.spec.slots[at].param for state in states for at in state.touched)

    def cleared(self, optimizer: int | None) -> None:
        """``zero_grad()`` of one optimizer, or of all."""
        if optimizer is None:
            self._left.clear()
        else:
            self._left.pop(optimizer, None)

    def replaced(self, param: int) -> None:
        """The program has put a gradient, or ``None``, in the place of the parameter's."""
        for left in self._left.values():
            left.discard(param)

    def check(self, optimizer: int, name: str) -> None:
        """Warn, once, that a step of ``optimizer`` differs from plain PyTorch's, if it does.

        Args:
            optimizer: its index.
            name: its class.
        """
        left = self._left.get(optimizer)
        if not left or self._told:
            return
        self._told = True
        self._left.clear()
        warn_user(
            f"step() of {name}, and no zero_grad() since the step before, which used {len(left)} gradients up: plain "
            "PyTorch would add them to those of this step, here they are gone. Call zero_grad() between steps; to add "
            "up gradients, make several backward passes before one step()"
        )
