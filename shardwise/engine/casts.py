"""Casting the floating tensors of nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

__all__ = ["cast_floats", "map_tensors"]


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in it replaced by ``change(tensor)``.

    Lists, tuples, named tuples, mappings (their own class kept, as Hugging Face's ``ModelOutput``) and dataclasses are
    entered; anything else is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)  # keeps the class: a Hugging Face ModelOutput stays one
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating tensors in ``dtype``; integers and booleans are left."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)
