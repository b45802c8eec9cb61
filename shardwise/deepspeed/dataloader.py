"""DeepSpeed's data loader and helpers that move tensors in nested values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class RepeatingLoader:
    """Starts ``loader`` again when it is exhausted.

    Raises:
        StopIteration: ``loader`` is empty.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Return the number of batches of ``loader``."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def _each(item: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return ``item`` with ``change`` applied to every tensor in lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_each(value, change) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_each(value, change) for value in item)
    if isinstance(item, dict):
        return type(item)({key: _each(value, change) for key, value in item.items()})
    return item


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy whose tensors are on ``device`` and do not share memory."""
    return _each(item, lambda tensor: tensor.detach().to(device, copy=True))


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors, or those that ``criterion_func`` accepts, on ``device``."""
    expected = criterion_func or (lambda _: True)
    return _each(item, lambda tensor: tensor.to(device) if expected(tensor) else tensor)
