"""Gradients that a program changes itself, which every rank has to change alike."""

from __future__ import annotations

import math
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from shardwise.core.mesh import Mesh

__all__ = ["ByHand"]

NOTHING = [0.0, 0.0, 0.0, 0.0, 0.0]
"""What travels of a parameter: how often it was changed, by which numbers, norm and sum of a tensor, its digits."""
DIGITS = 1e-4
"""Numbers of a program may differ by so much of the largest."""


@dataclass
class Change:
    """Of one gradient since the last step: how often it was changed, the numbers that it was changed by, one after the
    other in one, and norm and sum of what was assigned."""

    count: int = 0
    by: float = 0.0
    given: torch.Tensor | None = None
    by_tensor: bool = False
    digits: float = DIGITS


@dataclass
class Used:
    """What replicas made their last step of: places of parameters with how often and by what, and norms and sums of
    this rank's parts, which are read when they are compared."""

    numbers: list[tuple[int, float, float]] = field(default_factory=list)
    of_parts: dict[int, torch.Tensor] = field(default_factory=dict)

    def rows(self) -> dict[int, list[float]]:
        """By parameter, as :data:`NOTHING`."""
        return _with_figures({index: [count, by, 0.0, 0.0, DIGITS] for index, count, by in self.numbers}, self.of_parts)


# [Note: What is assigned is compared]
# backward() averages over the ranks; what a program makes itself (torch.autograd.grad, a division by its own number of
# tokens) and puts into .grad is its own rank's. Each rank would take its shard of another gradient, and replicas would
# drift apart for ever. So what is assigned, and the numbers that gradients are changed by, are compared: exactly by a
# word that rides on the norm's exchange, and where that differs by norm and sum, since gradients that ranks compute
# alike may differ in their last bits: half of the digits have to agree. A tensor that a gradient is changed by in place
# is not: of a shard no other rank has that part, so noise of its own does no harm. Among replicas every rank has every
# part, so what came of it is compared; and as they exchange nothing in a step, when the next pass ends. Numbers on a
# device are left out: to read them would wait for it.
class ByHand:
    """Of one engine, by optimizer: what was changed since its last step.

    Args:
        names: of the parameters, by index, the same on every rank.
        optimizers: indices of those that are trained.
        mesh: the ranks.
        own_part: what this rank has of a reduced gradient now.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        optimizers: Sequence[int],
        mesh: Mesh,
        own_part: Callable[[int], torch.Tensor | None],
    ) -> None:
        self._names, self._optimizers, self._mesh = names, list(optimizers), mesh
        self._own_part = weakref.WeakMethod(own_part)
        self._changes: dict[int, dict[int, Change]] = {}
        self._used: dict[int, Used] = {}

    def _change(self, optimizer: int, index: int) -> Change:
        return self._changes.setdefault(optimizer, {}).setdefault(index, Change())

    def changed(self, optimizer: int, index: int, operands: Iterable[Any] | None) -> None:
        """A gradient is being changed in place by these operands; ``None``: by an operation that is not known."""
        change = self._change(optimizer, index)
        change.count += 1
        change.by_tensor |= operands is None
        for each in operands or ():
            if isinstance(each, torch.Tensor) and each.dim():
                change.by_tensor = True
            elif isinstance(each, Real) or (isinstance(each, torch.Tensor) and each.device.type == "cpu"):
                change.by = 31.0 * change.by + float(each)

    def given(self, optimizer: int, index: int, whole: torch.Tensor) -> None:
        """A tensor was put in a gradient's place."""
        change = self._change(optimizer, index)
        change.given, change.by_tensor, change.digits = _figures(whole), True, _digits(whole)

    def forget(self, optimizer: int | None) -> None:
        """The gradients of one optimizer, or of all, were used or dropped."""
        for each in list(self._changes) if optimizer is None else (optimizer, -1):
            self._changes.pop(each, None)

    # ---- within the shard group

    def mark(self, optimizer: int) -> float:
        """What was changed by hand since the last step, as a number that ranks can compare; 0.0: nothing."""
        changes = self._changes.get(optimizer)
        return _word(self._rows(changes)) if changes else 0.0

    def _rows(self, changes: Mapping[int, Change]) -> dict[int, list[float]]:
        rows = {index: [float(change.count), change.by, 0.0, 0.0, change.digits] for index, change in changes.items()}
        return _with_figures(rows, {i: change.given for i, change in changes.items() if change.given is not None})

    def compare(self, optimizer: int) -> None:
        """The ranks' marks differ. Collective.

        Raises:
            RuntimeError: they have changed other gradients, or by other numbers, or assigned other values.
        """
        changes = self._changes.get(optimizer, {})
        rows = self._rows(changes)
        told = [number for index in self._names for number in rows.get(index, NOTHING)]
        posts = self._mesh.shard.exchange(told, "which gradients were changed by hand")
        for at, index in enumerate(self._names):
            own = [post[at * len(NOTHING) : (at + 1) * len(NOTHING)] for post in posts]
            self._refuse(index, own, "nothing was updated")

    # ---- among replicas

    def used(self, optimizer: int) -> None:
        """A step uses what there is now."""
        own_part = self._own_part()
        if self._mesh.replicate.size == 1 or own_part is None:
            return
        changes = self._changes.get(optimizer, {})
        numbers = [(index, float(change.count), change.by) for index, change in changes.items()]
        parts = {index: own_part(index) for index, change in changes.items() if change.by_tensor}
        self._used[optimizer] = Used(numbers, {i: _figures(part) for i, part in parts.items() if part is not None})

    def beside_marks(self) -> list[float]:
        """What travels at the end of a pass."""
        if self._mesh.replicate.size == 1:
            return []
        return [_word(self._used[each].rows()) if each in self._used else 0.0 for each in self._optimizers]

    def explain(self) -> None:
        """Some rank's number differs. Every rank calls it.

        Raises:
            RuntimeError: replicas have changed gradients differently in the last step.
        """
        rows = {index: row for used in self._used.values() for index, row in used.rows().items()}
        self._used.clear()  # compared once; what follows a checkpoint is not to blame
        told = [self._mesh.shard.rank, sorted(rows.items())]
        everything: list[Any] = self._mesh.world.exchange_object(told, "changed gradients")
        for index in self._names:
            for shard in range(self._mesh.shard.size):
                own = [dict(items).get(index, NOTHING) for rank, items in everything if rank == shard]
                self._refuse(index, own, "the replicas have been updated differently: load a checkpoint")

    # ---- what is said

    def _refuse(self, index: int, rows: Sequence[Sequence[float]], what: str) -> None:
        """Where what the ranks did to one gradient is not alike."""
        counts, by, norms, sums, digits = zip(*rows, strict=True)
        most = max(digits) * max(norms)
        if not _alike(counts, 0.0):
            said = f"assigned, cleared or changed in place other than on its peers (times: {_by_rank(counts)})"
            raise RuntimeError(f"{self._names[index]}.grad was {said}: every rank must do the same; {what}")
        if not _alike(by, DIGITS * max(map(abs, by))):
            said = f"changed by other numbers than on its peers ({_by_rank(by)})"
        elif not (_alike(norms, most) and _alike(sums, most)):
            said = f"given other values than on its peers (norms: {_by_rank(norms)})"
        else:
            return
        raise RuntimeError(
            f"{self._names[index]}.grad was {said}. What a program makes itself, by torch.autograd.grad or of its own "
            "rank's numbers, is not averaged over the ranks: average it (torch.distributed.all_reduce), or let "
            f"backward() make it; {what}"
        )


def _figures(values: torch.Tensor) -> torch.Tensor:
    wide = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    return torch.stack([torch.linalg.vector_norm(wide), wide.sum()]).double()


def _with_figures(rows: dict[int, list[float]], figures: Mapping[int, torch.Tensor]) -> dict[int, list[float]]:
    """``rows`` with what is read here, at once of each device."""
    for device in {each.device for each in figures.values()}:
        there = {index: each for index, each in figures.items() if each.device == device}
        for index, found in zip(there, torch.stack(list(there.values())).tolist(), strict=True):
            rows[index][2:4] = found
    return rows


def _digits(values: torch.Tensor) -> float:
    return torch.finfo(values.dtype).eps ** 0.5 if values.is_floating_point() else 0.0


def _word(rows: Mapping[int, Sequence[float]]) -> float:
    numbers = array("d")
    for index in sorted(rows):
        numbers.append(index)
        numbers.extend(rows[index])
    return float(zlib.crc32(numbers.tobytes()) + 1) if rows else 0.0


def _alike(values: Sequence[float], most: float) -> bool:
    first = values[0]
    if not math.isfinite(first):
        return all(value == first or (math.isnan(value) and math.isnan(first)) for value in values)
    return all(abs(value - first) <= most for value in values)


def _by_rank(values: Sequence[float]) -> str:
    return ", ".join(f"rank {rank} {value:.4g}" for rank, value in enumerate(values))
