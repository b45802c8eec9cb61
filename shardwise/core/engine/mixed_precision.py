"""Casts of floating tensors: in nested containers, and of buffers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from shardwise.core.base.torch_internals import no_torch_function


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with every tensor in it replaced by ``change(tensor)``.

    Lists, tuples, named tuples, mappings (of any class) and dataclasses are entered; anything else, and a container in
    which nothing changed, is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        items = {key: map_tensors(item, change) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        changed = copy.copy(value)
        for key, item in items.items():
            changed[key] = item
        return changed
    if isinstance(value, list | tuple):
        parts = [map_tensors(item, change) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        # Named tuples take their fields one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        same = all(fields[name] is getattr(value, name) for name in fields)
        return value if same else dataclasses.replace(value, **fields)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating tensors in ``dtype``; integers and booleans stay."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


def dtype_of_buffer(buffer: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that ``buffer`` has under the plan's ``buffer_dtype``."""
    casts = dtype is not None and buffer.is_floating_point() and buffer.dtype != torch.float64
    return dtype if casts and dtype is not None else buffer.dtype


def buffer_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes that the buffers of ``model`` take under the plan's ``buffer_dtype``."""
    with no_torch_function():  # those of a deferred construction have no memory
        return sum(each.numel() * dtype_of_buffer(each, dtype).itemsize for each in model.buffers())
