"""State dictionaries as JSON plus named tensors, or as JSON alone, without loss.

JSON has no tuples, no keys but strings and no infinities, while optimizer and scheduler states use all of them
(``betas``, per-parameter integers, ``ReduceLROnPlateau.best``). Each is written as an object with one ``"$..."`` key.

Tensors stand beside the data under names, or, where they are small (step counts), in it: a scalar becomes ``{"dtype":
"float32", "value": 3.0}``. Every float of up to 64 bits has an exact double, and JSON prints the shortest text that
reads back as the same double.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

__all__ = []


def encode(value: object, tensors: dict[str, torch.Tensor] | None, path: str = "") -> Any:
    """``value`` as JSON-able data.

    Args:
        value: of numbers, strings, None, tensors, lists, tuples and dicts.
        tensors: its tensors are added to these under their path, as contiguous CPU copies; ``None``: they are in the
            data, where :func:`decode` finds them if it is given ``None``, too.
        path: of the value, for names and messages.

    Raises:
        TypeError: something in it is neither a number, string, None, tensor, list, tuple nor dict, or is a sparse
            tensor; the path is named.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(
                f"{path or 'the state'} is a tensor {tuple(value.shape)} of layout {value.layout}, which a checkpoint "
                "cannot hold; keep its indices and values, or to_dense()"
            )
        if tensors is None:
            return _in_place(value)
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


def _encode_mapping(value: Mapping[Any, object], tensors: dict[str, torch.Tensor] | None, path: str) -> Any:
    items = [(key, encode(item, tensors, f"{path}/{key}" if path else str(key))) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, tensors, f"{path}/(key)"), item] for key, item in items]}
    plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in items)
    if plain and not (tensors is None and _is_tensor(value)):
        return dict(items)
    return {"$items": [[encode(key, tensors, f"{path}/(key)"), item] for key, item in items]}


def decode(data: Any, tensors: Mapping[str, torch.Tensor] | None) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        KeyError: a tensor that the data refers to is not in ``tensors``.
    """
    if isinstance(data, list):
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if tensors is None and _is_tensor(data):
        return _tensor(data, data["value"])
    if len(data) == 1:
        (kind, content), *_ = data.items()
        if kind == "$tensor":
            return (tensors or {})[content]
        if kind == "$float":
            return float(content)
        if kind == "$tuple":
            return tuple(decode(item, tensors) for item in content)
        if kind == "$counter":
            return Counter({_key(key, tensors): decode(item, tensors) for key, item in content})
        if kind == "$items":
            return {_key(key, tensors): decode(item, tensors) for key, item in content}
    return {key: decode(item, tensors) for key, item in data.items()}


def _key(data: Any, tensors: Mapping[str, torch.Tensor] | None) -> Any:
    key = decode(data, tensors)
    # Python's hash of an integer is its rest modulo 2^61 - 1: a file could give all keys the same one.
    if isinstance(key, int) and key.bit_length() > 64:
        raise ValueError(f"a key of {key.bit_length()} bits")
    return key


# ---- tensors in the data


def _in_place(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.ndim:
        return {"dtype": _dtype(tensor), "shape": list(tensor.shape), "value": _values(tensor)}
    return {"dtype": _dtype(tensor), "value": _values(tensor)[0]}


def _is_tensor(data: Mapping[Any, object]) -> bool:
    return set(data) in ({"dtype", "value"}, {"dtype", "shape", "value"}) and isinstance(data["dtype"], str)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _values(tensor: torch.Tensor) -> list[Any]:
    return [encode(value, None) for value in tensor.detach().reshape(-1).tolist()]


def _tensor(data: Mapping[str, Any], values: Any) -> torch.Tensor:
    kind = getattr(torch, data["dtype"])
    return torch.tensor(decode(values, None), dtype=kind, device="cpu").reshape(data.get("shape", ()))
