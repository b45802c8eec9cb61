"""Gradients that the user assigned or changed, which every rank has to do in the same way."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from shardwise.core.comm import Group

__all__ = ["UserGrads"]

NOTHING = [0.0, 0.0, 0.0, 0.0, 0.0]
"""The row of a gradient that was not changed; see :class:`Change`."""
TOLERANCE = 1e-4
"""Numbers of a program may differ between ranks by this part of the largest."""


@dataclass
class Change:
    """Changes of one gradient since the last step.

    Attributes:
        count: how often it was changed.
        by: the numbers that it was changed by, hashed into one.
        figures: norm and sum of an assigned tensor.
        tolerance: relative difference that the figures of two ranks may have.
    """

    count: int = 0
    by: float = 0.0
    figures: torch.Tensor | None = None
    tolerance: float = TOLERANCE


# [Note: Assigned gradients are compared]
# backward() averages over the ranks. A gradient that the program computes itself (torch.autograd.grad, a division by
# its own number of tokens) and assigns to .grad is this rank's own: each rank would take its shard of another gradient.
# So what is assigned, and the numbers that gradients are changed by, are compared before the step: exactly, by a word
# that travels with the norm. If the words differ, the norm and sum of each assigned tensor must agree in half of their
# digits, since the same computation may differ between ranks in its last bits. A tensor that a gradient is changed by
# in place is not compared: each shard has one owner. Replicas are not compared (neither does DDP). Numbers on a device
# are not read, since that would wait for the device.
class UserGrads:
    """Changes of gradients by the user since the last step, by optimizer.

    Args:
        names: of the parameters, by index, the same on every rank.
        group: the ranks that shard them.
    """

    def __init__(self, names: Mapping[int, str], group: Group) -> None:
        self._names, self._group = names, group
        self._changes: dict[int, dict[int, Change]] = {}

    def _change(self, optimizer: int, index: int) -> Change:
        return self._changes.setdefault(optimizer, {}).setdefault(index, Change())

    def changed(self, optimizer: int, index: int, operands: Iterable[Any] | None) -> None:
        """Note an in-place change of a gradient by these operands; ``None``: by an unknown operation."""
        change = self._change(optimizer, index)
        change.count += 1
        for each in operands or ():
            if isinstance(each, Real) or (isinstance(each, torch.Tensor) and not each.dim() and each.is_cpu):
                change.by = 31.0 * change.by + float(each)

    def assigned(self, optimizer: int, index: int, value: torch.Tensor) -> None:
        """Note that a gradient was replaced by the full tensor ``value``."""
        change = self._change(optimizer, index)
        wide = value.to(torch.float64 if value.dtype == torch.float64 else torch.float32)
        change.figures = torch.stack([torch.linalg.vector_norm(wide), wide.sum()]).double()
        change.tolerance = torch.finfo(value.dtype).eps ** 0.5 if value.is_floating_point() else 0.0

    def forget(self, optimizer: int | None) -> None:
        """The gradients of one optimizer, or of all, were used or dropped."""
        for each in list(self._changes) if optimizer is None else (optimizer, -1):
            self._changes.pop(each, None)

    def mark(self, optimizer: int) -> float:
        """Return a fingerprint of the changes since the last step; 0.0 if there are none."""
        changes = self._changes.get(optimizer)
        if not changes:
            return 0.0
        numbers = array("d")
        for index, row in sorted(self._rows(changes).items()):
            numbers.extend([index, *row])
        return float(zlib.crc32(numbers.tobytes()) + 1)

    def _rows(self, changes: Mapping[int, Change]) -> dict[int, list[float]]:
        rows = {index: [float(each.count), each.by, 0.0, 0.0, each.tolerance] for index, each in changes.items()}
        figures = {index: each.figures for index, each in changes.items() if each.figures is not None}
        for device in {each.device for each in figures.values()}:  # one read a device
            own = {index: each for index, each in figures.items() if each.device == device}
            for index, pair in zip(own, torch.stack(list(own.values())).tolist(), strict=True):
                rows[index][2:4] = pair
        return rows

    def compare(self, optimizer: int) -> None:
        """Compare the changes of all ranks after their fingerprints differed. Collective.

        Raises:
            RuntimeError: ranks changed different gradients, by different numbers, or assigned different values.
        """
        rows = self._rows(self._changes.get(optimizer, {}))
        own = [number for index in self._names for number in rows.get(index, NOTHING)]
        posts = self._group.exchange(own, "which gradients were changed by hand")
        for at, index in enumerate(self._names):
            self._check(index, [post[at * len(NOTHING) : (at + 1) * len(NOTHING)] for post in posts])

    def _check(self, index: int, rows: Sequence[Sequence[float]]) -> None:
        """Raise if the ranks changed one gradient differently."""
        counts, by, norms, sums, tolerances = zip(*rows, strict=True)
        most = max(tolerances) * max(norms)
        if not _agree(counts, 0.0):
            raise RuntimeError(
                f"{self._names[index]}.grad was assigned, cleared or changed in place differently on the ranks (times: "
                f"{_by_rank(counts)}): every rank must do the same; nothing was updated"
            )
        if not _agree(by, TOLERANCE * max(map(abs, by))):
            problem = f"changed by different numbers on the ranks ({_by_rank(by)})"
        elif not (_agree(norms, most) and _agree(sums, most)):
            problem = f"given different values on the ranks (norms: {_by_rank(norms)})"
        else:
            return
        raise RuntimeError(
            f"{self._names[index]}.grad was {problem}. A gradient that the program computes itself is not averaged "
            "over the ranks: average it (torch.distributed.all_reduce), or let backward() compute it; nothing was "
            "updated"
        )


def _agree(values: Sequence[float], most: float) -> bool:
    first = values[0]
    if not math.isfinite(first):
        return all(value == first or (math.isnan(value) and math.isnan(first)) for value in values)
    return all(abs(value - first) <= most for value in values)


def _by_rank(values: Sequence[float]) -> str:
    return ", ".join(f"rank {rank} {value:.4g}" for rank, value in enumerate(values))
