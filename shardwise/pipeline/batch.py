"""Batches in micro-batches, and their outputs as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MicroBatch", "merged", "split_batch"]


ITEMS = "num_items_in_batch"
"""By what models of transformers divide a sum over tokens to make it their loss."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        inputs: as the batch is; of ``num_items_in_batch`` its share, so that the mean of the losses, weighed by rows,
            is the sum over all tokens divided by that number.
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
        return tuple((name, value.shape) for name, value in _tensors(self.inputs))


def _listed(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, tuple | list) else (batch,)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]")


def _rows(batch: Any) -> int:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return int(batch["input_ids"].shape[0])
    values = batch.values() if isinstance(batch, Mapping) else _listed(batch)
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
    sizes = sizes or [value.shape[0] for _, value in _tensors(batch) if value.dim()]
    if not sizes:
        raise ValueError(f"a batch of {type(batch).__name__} without a tensor: there is nothing to divide")
    return Counter(sizes).most_common(1)[0][0]


def split_batch(batch: Any, number: int | None, rows: int | None) -> list[MicroBatch]:
    """A batch in micro-batches along the first dimension of its tensors, also of those inside of mappings, lists and
    tuples; what does not have as many rows as most do goes to each whole.

    Args:
        batch: a mapping, a sequence, or one tensor.
        number: of micro-batches; fewer where there are fewer rows. They are as even as can be.
        rows: of each but the last, where ``number`` is ``None``.

    Raises:
        ValueError: the batch has no rows; or a list in it may have an item a row.
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
    return [
        MicroBatch(_part(batch, start, size, total), size / total) for start, size in zip(starts, sizes, strict=True)
    ]


def _part(batch: Any, start: int, size: int, total: int) -> Any:
    if isinstance(batch, Mapping):
        return {
            name: _items(value, size / total) if name == ITEMS else _rows_of(value, start, size, total, str(name))
            for name, value in batch.items()
        }
    if isinstance(batch, tuple | list):
        return [_rows_of(value, start, size, total, f"[{index}]") for index, value in enumerate(batch)]
    return _rows_of(batch, start, size, total, "")


def _items(value: Any, share: float) -> Any:
    if isinstance(value, Tensor):
        return value.double() * share  # nothing is waited for; 32 bits would round the share
    return value if value is None else value * share


def _rows_of(value: Any, start: int, size: int, total: int, name: str) -> Any:
    """Rows ``start`` to ``start + size`` of ``total``, of each tensor in ``value`` that has so many."""
    if isinstance(value, Tensor):
        return value.narrow(0, start, size) if value.dim() and value.shape[0] == total else value
    if isinstance(value, Mapping):
        return {key: _rows_of(each, start, size, total, f"{name}.{key}") for key, each in value.items()}
    if not isinstance(value, tuple | list):
        return value
    divides = any(each.dim() and each.shape[0] == total for _, each in _tensors(value))
    if isinstance(value, list) and len(value) == total > size and not divides:
        raise ValueError(
            f"{name} of a batch is a list of {total} items, as many as the batch has rows, and lists are not divided: "
            "give a tensor, leave it out, or, if every micro-batch is to have all of it, give a tuple"
        )
    parts = [_rows_of(each, start, size, total, f"{name}[{index}]") for index, each in enumerate(value)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


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
