"""Step counts, options of parameter groups and other small values as JSON, exactly.

A tensor scalar becomes ``{"dtype": "float32", "value": 3.0}``; every float of up to 64 bits has an exact double, and
JSON prints the shortest text that reads back as the same double. Tuples, infinities and keys that are not strings are
written as :mod:`shardwise.checkpoint.tree` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.checkpoint import tree

__all__ = ["decode_value", "encode_value", "options_of", "options_to_torch"]


def encode_value(value: object) -> Any:
    """``value`` as JSON.

    Raises:
        TypeError: it is not a number, string, None, tensor or container of those.
    """
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        data = {"dtype": str(plain.dtype).removeprefix("torch."), "value": tree.encode(plain.tolist(), {})}
        if plain.ndim:
            data["shape"] = list(plain.shape)
        return data
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [encode_value(item) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode_value(item) for key, item in value.items()}
    return tree.encode(value, {})


def decode_value(data: Any) -> Any:
    """The value that :func:`encode_value` was given."""
    if isinstance(data, list):
        return [decode_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    if set(data) in ({"dtype", "value"}, {"dtype", "value", "shape"}) and isinstance(data["dtype"], str):
        values = tree.decode(data["value"], {})
        return torch.tensor(values, dtype=getattr(torch, data["dtype"])).reshape(data.get("shape", ()))
    if set(data) == {"$tuple"}:
        return tuple(decode_value(item) for item in data["$tuple"])
    if any(key.startswith("$") for key in data):
        return tree.decode(data, {})
    return {key: decode_value(item) for key, item in data.items()}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options (everything but its parameters) as JSON."""
    return {key: encode_value(value) for key, value in group.items() if key not in ("params", "param_names")}


def options_to_torch(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as an optimizer has them."""
    return {key: decode_value(value) for key, value in options.items()}
