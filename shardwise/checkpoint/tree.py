"""State dictionaries as JSON plus named tensors, without loss.

JSON has no tuples, no keys but strings and no infinities, while optimizer and scheduler states use all of them
(``betas``, per-parameter integers, ``ReduceLROnPlateau.best``). Each is written as an object with one ``"$..."`` key.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["decode", "encode", "inline", "outline"]


def encode(value: object, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """``value`` as JSON-able data; its tensors are added to ``tensors`` under their path, as contiguous CPU copies.

    Raises:
        TypeError: something in it is neither a number, string, None, tensor, list, tuple nor dict; the path is named.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor):
        while path in tensors:  # {"a": {"b": ...}, "a/b": ...}, or the keys 1 and "1"
            path += "~"
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"$tensor": path}
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, list):
        return [encode(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    raise TypeError(
        f"{path or 'the state'} is a {type(value).__name__} ({value!r:.80}), which a checkpoint cannot hold; "
        "keep numbers, strings, None, tensors, lists, tuples and dicts in state_dict()"
    )


def _encode_mapping(value: Mapping[Any, object], tensors: dict[str, torch.Tensor], path: str) -> Any:
    items = [(key, encode(item, tensors, f"{path}/{key}" if path else str(key))) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, tensors, f"{path}/(key)"), item] for key, item in items]}
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$items": [[encode(key, tensors, f"{path}/(key)"), item] for key, item in items]}


def decode(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        KeyError: a tensor that the data refers to is not in ``tensors``.
    """
    if isinstance(data, list):
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        (kind, content), *_ = data.items()
        if kind == "$tensor":
            return tensors[content]
        if kind == "$float":
            return float(content)
        if kind == "$tuple":
            return tuple(decode(item, tensors) for item in content)
        if kind == "$counter":
            return Counter({_key(key, tensors): decode(item, tensors) for key, item in content})
        if kind == "$items":
            return {_key(key, tensors): decode(item, tensors) for key, item in content}
    return {key: decode(item, tensors) for key, item in data.items()}


def _key(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    key = decode(data, tensors)
    # Python's hash of an integer is its rest modulo 2^61 - 1: a file could give all keys the same one.
    if isinstance(key, int) and key.bit_length() > 64:
        raise ValueError(f"a key of {key.bit_length()} bits")
    return key


def inline(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Small tensors as JSON (the exact values: every float has an exact double)."""
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "values": encode(tensor.reshape(-1).tolist(), {}, name),
        }
        for name, tensor in tensors.items()
    }


def outline(data: Any) -> dict[str, torch.Tensor]:
    """The tensors that :func:`inline` was given."""
    return {
        name: torch.tensor(decode(item["values"], {}), dtype=getattr(torch, item["dtype"])).reshape(item["shape"])
        for name, item in data.items()
    }
