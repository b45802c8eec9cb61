"""Batches in micro-batches, and their outputs as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MicroBatch", "merged", "split_batch"]


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        inputs: as the batch is.
        share: of the batch's rows.
    """

    inputs: Any
    share: float

    @property
    def args(self) -> Sequence[Any]:
        return () if isinstance(self.inputs, Mapping) else _listed(self.inputs)

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.inputs) if isinstance(self.inputs, Mapping) else {}

    @property
    def key(self) -> tuple[object, ...]:
        """What the shapes inside of a model follow from; the same on every rank."""
        values = self.inputs.items() if isinstance(self.inputs, Mapping) else enumerate(_listed(self.inputs))
        return tuple((name, value.shape) for name, value in values if isinstance(value, Tensor))


def _listed(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, tuple | list) else (batch,)


def _rows(batch: Any) -> int:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return int(batch["input_ids"].shape[0])
    values = batch.values() if isinstance(batch, Mapping) else _listed(batch)
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
    if not sizes:
        raise ValueError(f"a batch of {type(batch).__name__} without a tensor: there is nothing to divide")
    return Counter(sizes).most_common(1)[0][0]


def split_batch(batch: Any, number: int | None, rows: int | None) -> list[MicroBatch]:
    """A batch in micro-batches along the first dimension of its tensors; what does not have as many rows as most do
    goes to each whole.

    Args:
        batch: a mapping, a sequence, or one tensor.
        number: of micro-batches; fewer where there are fewer rows. They are as even as can be.
        rows: of each but the last, where ``number`` is ``None``.

    Raises:
        ValueError: the batch has no rows.
    """
    total = _rows(batch)
    if total < 1:
        raise ValueError(f"a batch of {total} rows: give at least one")
    if number is not None:
        count = min(number, total)
        sizes = [total // count + (index < total % count) for index in range(count)]
    else:
        rows = rows or total
        sizes = [min(rows, total - start) for start in range(0, total, rows)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]

    def part(value: Any, start: int, size: int) -> Any:
        divides = isinstance(value, Tensor) and value.dim() and value.shape[0] == total
        return value.narrow(0, start, size) if divides else value

    def inputs(start: int, size: int) -> Any:
        if isinstance(batch, Mapping):
            return {name: part(value, start, size) for name, value in batch.items()}
        if isinstance(batch, tuple | list):
            return [part(value, start, size) for value in batch]
        return part(batch, start, size)

    return [MicroBatch(inputs(start, size), size / total) for start, size in zip(starts, sizes, strict=True)]


def merged(outputs: Sequence[Any]) -> Any:
    """The micro-batches' outputs as one: tensors one behind the other, numbers in a tensor of one dimension."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {name: merged([each[name] for each in outputs]) for name in first}
    if isinstance(first, tuple | list):
        return [merged(each) for each in zip(*outputs, strict=True)]
    return first
