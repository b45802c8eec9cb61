"""Division of batches into micro-batches, and merging of their outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ITEMS = "num_items_in_batch"
"""Argument by which models of transformers divide a sum over tokens to get their loss."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        inputs: the inputs, in the structure of the batch. ``num_items_in_batch`` is multiplied by ``share``, so that
            the mean of the losses, weighted by rows, is the sum over all tokens divided by the number for the batch.
        share: fraction of the batch's rows.
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
        """The shapes of the inputs, which determine shapes in the model. Equal on every rank."""
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
    """Divide a batch into micro-batches along the first dimension of its tensors, including those in mappings, lists
    and tuples. Values that do not have the most common number of rows are passed to each micro-batch undivided.

    Args:
        batch: a mapping, a sequence, or one tensor.
        number: number of micro-batches, of nearly equal size; fewer if there are fewer rows.
        rows: number of rows of each but the last, if ``number`` is ``None``.

    Raises:
        ValueError: the batch has no rows, or a list in it may have one item per row.
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
        return value.double() * share  # does not synchronize; fp32 would round the product
    return value if value is None else value * share


def _rows_of(value: Any, start: int, size: int, total: int, name: str) -> Any:
    """Return rows ``start`` to ``start + size`` of each tensor in ``value`` that has ``total`` rows."""
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


# [Note: Outputs of micro-batches as one]
# The outputs of the last stage are merged element by element, in containers of the classes of the first output. Tensors
# are concatenated along rows. A 0-dim tensor, and a Python number that is not the same in each, become a tensor with
# one element per micro-batch, since it is unknown whether it is a sum or a mean. Other differences have no meaning for
# the batch and are an error, which is raised in a pass as soon as it is detected, so that every rank reports it.
def merged(outputs: Sequence[Any]) -> Any:
    """Merge the micro-batches' outputs; see [Note: Outputs of micro-batches as one].

    Raises:
        TypeError: see :func:`check_mergeable`.
    """
    return _joined(outputs, lambda tensors: torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors), "")


def detached(output: Any) -> Any:
    """Return a micro-batch's output without graphs, in containers of its own classes."""
    return _joined([output], lambda tensors: tensors[0].detach(), "")


def check_mergeable(first: Any, other: Any) -> None:
    """Check that two micro-batches' outputs can be merged.

    Raises:
        TypeError: a value in them cannot be merged.
    """
    _joined([first, other], lambda tensors: tensors[0], "")


def _joined(values: Sequence[Any], join: Callable[[list[Tensor]], Tensor], name: str) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if len({_sizes(each) for each in values}) == 1:
            return join(list(values))
    elif isinstance(first, Mapping):
        if all(isinstance(each, Mapping) and each.keys() == first.keys() for each in values):
            return _with_items(first, {key: _joined([v[key] for v in values], join, f"{name}.{key}") for key in first})
    elif isinstance(first, tuple | list):
        if all(isinstance(each, tuple | list) and len(each) == len(first) for each in values):
            parts = [_joined(each, join, f"{name}[{at}]") for at, each in enumerate(zip(*values, strict=True))]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    elif dataclasses.is_dataclass(first) and not isinstance(first, type):
        if all(type(each) is type(first) for each in values):
            names = [field.name for field in dataclasses.fields(first) if field.init]
            fields = {each: _joined([getattr(v, each) for v in values], join, f"{name}.{each}") for each in names}
            return dataclasses.replace(first, **fields)
    elif all(_same(first, each) for each in values):
        return first
    elif all(isinstance(each, int | float) for each in values):
        kind = torch.float64 if any(isinstance(each, float) for each in values) else None
        return torch.tensor(values, dtype=kind, device="cpu")
    other = next((each for each in values[1:] if not _same(_outline(first), _outline(each))), values[-1])
    raise TypeError(
        f"outputs{name} is {_outline(first)} in one micro-batch and {_outline(other)} in another, which cannot be made "
        "one for return_outputs=True: have the model return tensors of as many dimensions and the same sizes "
        "behind the first, numbers, or what is the same in each; or leave return_outputs away"
    )


def _with_items(first: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(first, MutableMapping):
        return items
    changed = copy.copy(first)
    for key, item in items.items():
        changed[key] = item
    return changed


def _same(first: Any, other: Any) -> bool:
    try:
        return first is other or bool(first == other)
    except Exception:  # arrays, whose truth value is ambiguous
        return False


def _sizes(value: Any) -> object:
    """Return what must be equal for tensors to be merged."""
    if not isinstance(value, Tensor):
        return None
    return (value.shape[1:],) if value.dim() else ()


def _outline(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {[*value]!r:.60}"
    return f"{value!r:.60}" if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
