"""What the gradients held now are made of: how many passes of each optimizer's step, under which loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["StepCounts"]


class StepCounts:
    """Counts of one model's steps, the same on every rank after each reduced pass.

    Attributes:
        loss_scale: the scale that the gradients held now carry.
        optimizers: indices of those with gradients (-1: parameters of none).
        reduced: by optimizer, passes that reached a parameter of it on some rank since its gradients were used or
            dropped.
    """

    def __init__(self, optimizers: Iterable[int]) -> None:
        self.loss_scale = 1.0
        self.optimizers = sorted(set(optimizers))
        self.reduced = dict.fromkeys(self.optimizers, 0)
        self._unreduced = dict.fromkeys(self.optimizers, 0)

    def so_far(self, optimizer: int) -> int:
        """As :attr:`reduced`, with passes of this rank that are not reduced yet."""
        return self.reduced.get(optimizer, 0) + self._unreduced.get(optimizer, 0)

    def unreduced(self) -> list[int]:
        """This rank's passes that are not reduced yet, in the order of :attr:`optimizers`."""
        return [self._unreduced[optimizer] for optimizer in self.optimizers]

    def pass_reached(self, optimizers: Iterable[int]) -> None:
        """A pass on this rank gave gradients to these."""
        for optimizer in optimizers:
            self._unreduced[optimizer] += 1

    def were_reduced(self, passes: Sequence[int]) -> None:
        """The ranks have reduced what they held: so many ``passes`` of each of :attr:`optimizers`."""
        for optimizer, count in zip(self.optimizers, passes, strict=True):
            self.reduced[optimizer] += count
            self._unreduced[optimizer] = 0

    def forget(self, optimizers: Iterable[int] | None = None) -> None:
        """Gradients of these (``None``: of all) are used or dropped: nothing is to be divided by their passes."""
        for optimizer in self.optimizers if optimizers is None else self.reduced.keys() & set(optimizers):
            self.reduced[optimizer] = self._unreduced[optimizer] = 0
