"""Gradients that a step has used up, and that the program goes on as if they were still there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwise.core.base.remarks import warn_user
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.shards.layout import ParamFact

__all__ = ["UsedGrads"]


# [Note: A step uses gradients up]
# In plain PyTorch gradients stay until zero_grad(): a program without it adds the next pass's to them, or takes the
# same step twice. Here the step has used them, since updates during backward have when they are made, and a mean over
# passes or tokens has no meaning across a step. The result differs where such a program steps again, so that is where
# it is told: not in the pass before, whose gradients zero_grad() may still drop (two losses, one network).
# Gradients that are made zero instead (set_to_none=False) are gone here as well. Where one has none in the next step,
# plain PyTorch updates its parameter by zero, which momentum and decay turn into a change.
class UsedGrads:
    """By optimizer, the parameters whose gradient a step has used, and no ``zero_grad()`` has dropped since.

    Args:
        facts: of the parameters, by index.
    """

    def __init__(self, facts: Sequence[ParamFact]) -> None:
        self._facts = facts
        self._left: dict[int, set[int]] = {}
        self._zero: dict[int, set[int]] = {}
        """Those that have a gradient of zero in plain PyTorch, unless a pass gives them one."""
        self._told = self._told_zero = False

    def note(self, optimizer: int, states: Iterable[ChunkGrads]) -> None:
        """A step of ``optimizer`` is about to drop the gradients in ``states``."""
        if not self._told:
            left = self._left.setdefault(optimizer, set())
            left.update(state.spec.slots[at].param for state in states for at in state.touched)

    def cleared(self, optimizer: int | None, zero: Mapping[int, set[int]] | None) -> None:
        """``zero_grad()`` of one optimizer, or of all.

        Args:
            optimizer: its index, or ``None``.
            zero: by optimizer, which gradients were there; ``None``: they were to be ``None``.
        """
        for held in (self._left, self._zero)[: 2 if zero is None else 1]:
            for each in list(held) if optimizer is None else [optimizer]:
                held.pop(each, None)
        for each, params in (zero or {}).items():
            self._zero.setdefault(each, set()).update(params)

    def replaced(self, param: int) -> None:
        """The program has put a gradient, or ``None``, in the place of the parameter's."""
        for left in self._left.values():
            left.discard(param)

    def zeroed(self, optimizer: int, param: int) -> None:
        """The program has made zero of the used gradient of one parameter."""
        self.replaced(param)
        self._zero.setdefault(optimizer, set()).add(param)

    def check(self, optimizer: int, name: str, states: Iterable[ChunkGrads]) -> None:
        """Warn, once, that a step of ``optimizer`` differs from plain PyTorch's, if it does.

        Args:
            optimizer: its index.
            name: its class.
            states: the gradients that it is made of.
        """
        self._check_zero(self._zero.get(optimizer), name, states)
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

    def _check_zero(self, zero: set[int] | None, name: str, states: Iterable[ChunkGrads]) -> None:
        if not zero or self._told_zero:
            return
        missing = zero.difference(state.spec.slots[at].param for state in states for at in state.touched)
        if missing:
            self._told_zero = True
            warn_user(
                f"step() of {name} after zero_grad(set_to_none=False), and no gradient since for "
                f"{self._facts[min(missing)].names[0]} (of {len(missing)}): plain PyTorch would update it by one of "
                "zero (momentum, weight decay), here it stays as it is. Where that is meant, assign it: "
                "parameter.grad = torch.zeros_like(parameter)"
            )
