"""Encode nested values as JSON, with or without their tensors, and decode them without loss.

JSON has no tuples, no keys but strings and no infinities, while optimizer and scheduler states use all of them
(``betas``, per-parameter integers, ``ReduceLROnPlateau.best``). Each is written as an object with one ``"$..."`` key.

Tensors are kept under names outside the data or, if they are small (step counts), written into it: a scalar becomes
``{"dtype": "float32", "value": 3.0}``. Every float of up to 64 bits has an exact double, and JSON prints the shortest
text that reads back as the same double.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

Leaf = Callable[[Any, str], Any]
"""``leaf(tensor, path)``: the JSON-able value that stands for a tensor in the encoded data."""


def encode(value: object, tensors: dict[str, torch.Tensor] | None, path: str = "") -> Any:
    """Return ``value`` as JSON-able data.

    Args:
        value: numbers, strings, None, tensors, lists, tuples and dicts of these.
        tensors: receives the tensors under their paths, as contiguous CPU copies. ``None`` writes them into the data,
            and :func:`decode` has to be called with ``None``, too.
        path: path of the value, for names and messages.

    Raises:
        TypeError: a value of another type, or a sparse tensor; the path is named.
    """

    def leaf(tensor: torch.Tensor, path: str) -> Any:
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{path or 'the state'} is a tensor {tuple(tensor.shape)} of layout {tensor.layout}, which a "
                "checkpoint cannot hold; keep its indices and values, or to_dense()"
            )
        if tensors is None:
            shape = {"shape": list(tensor.shape)} if tensor.ndim else {}
            return {"dtype": _dtype(tensor), **shape, "value": _values(tensor) if shape else _values(tensor)[0]}
        while path in tensors:  # {"a": {"b": ...}, "a/b": ...}, or the keys 1 and "1"
            path += "~"
        tensors[path] = tensor.detach().to("cpu", copy=True).contiguous()
        return {"$tensor": path}

    return encode_with(value, leaf, path)


def encode_with(value: object, leaf: Leaf, path: str, kinds: tuple[type, ...] = (torch.Tensor,)) -> Any:
    """Like :func:`encode`, with the results of ``leaf`` in the places of tensors and other values of ``kinds``."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, kinds):
        return leaf(value, path)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, list | tuple):
        items = [encode_with(item, leaf, f"{path}/{index}", kinds) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [(k, encode_with(v, leaf, f"{path}/{k}" if path else str(k), kinds)) for k, v in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs) and not _is_tensor(value)
        if plain and not isinstance(value, Counter):
            return dict(pairs)
        kind = "$counter" if isinstance(value, Counter) else "$items"
        return {kind: [[encode_with(key, leaf, f"{path}/(key)", kinds), item] for key, item in pairs]}
    raise TypeError(
        f"{path or 'the state'} is a {type(value).__name__} ({value!r:.80}), which a checkpoint cannot hold; "
        "keep numbers, strings, None, tensors, lists, tuples and dicts in state_dict()"
    )


def decode(data: Any, tensors: Mapping[str, torch.Tensor] | None) -> Any:
    """Return the value that :func:`encode` was given.

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
            return ({} if tensors is None else tensors)[content]
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


def _is_tensor(data: Mapping[Any, object]) -> bool:
    return set(data) in ({"dtype", "value"}, {"dtype", "shape", "value"}) and isinstance(data["dtype"], str)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _values(tensor: torch.Tensor) -> list[Any]:
    return [encode(value, None) for value in tensor.detach().reshape(-1).tolist()]


def _tensor(data: Mapping[str, Any], values: Any) -> torch.Tensor:
    kind = getattr(torch, data["dtype"])
    return torch.tensor(decode(values, None), dtype=kind, device="cpu").reshape(data.get("shape", ()))
