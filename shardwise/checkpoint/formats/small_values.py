"""Step counts, options of parameter groups and other small values as JSON, exactly.

A tensor scalar becomes ``{"dtype": "float32", "value": 3.0}``; every float of up to 64 bits has an exact double, and
JSON prints the shortest text that reads back as the same double. Tuples, infinities and keys that are not strings are
written as :mod:`shardwise.checkpoint.tree` writes them. The native format holds the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint import tree

__all__ = ["decode_value", "encode_value", "group_options", "group_record"]


def encode_value(value: object) -> Any:
    """``value`` as JSON.

    Raises:
        TypeError: it is not a number, string, None, tensor or container of those.
    """
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        values = tree.encode(plain.reshape(-1).tolist(), {})
        data: dict[str, Any] = {"dtype": str(plain.dtype).removeprefix("torch.")}
        return data | ({"shape": list(plain.shape), "value": values} if plain.ndim else {"value": values[0]})
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


def group_record(names: Sequence[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group as JSON: the parameters' names and everything else in ``group``."""
    tensors: dict[str, torch.Tensor] = {}
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {"params": list(names), "options": tree.encode(options, tensors), "tensors": tree.inline(tensors)}


def group_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """The options of such a group, as an optimizer has them."""
    return dict(tree.decode(record.get("options", {}), tree.outline(record.get("tensors", {}))))
