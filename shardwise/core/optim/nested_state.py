"""State that holds tensors in lists, tuples and dicts (SOAP's matrices, one a dimension), as flat entries.

Flat, each tensor is an entry of its own, ``{"GG": [a, b]}`` becomes ``{"GG": {"$nested": ...}, "GG.0": a, "GG.1": b}``,
so that all that cuts, sends and stores state knows tensors and plain values alone. A list without any is a form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from shardwise.core.base import tree

__all__ = ["flat", "is_form", "mapped", "misfits", "nested", "outline", "tensors_of"]

NESTED = "$nested"


def flat(entry: Mapping[str, Any], leaves: tuple[type, ...] = (torch.Tensor,)) -> dict[str, Any]:
    """``entry`` with the ``leaves`` of nested values beside them.

    Raises:
        ValueError: an entry has the name that a nested tensor gets.
    """
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if not _holds(value):
            found[key] = value
            continue
        own: dict[str, Any] = {}
        found[key] = {NESTED: tree.encode_with(value, partial(_number, own, key), key, leaves)}
        if not own.keys().isdisjoint(entry):
            raise ValueError(f"optimizer state {sorted(own.keys() & entry.keys())}: {key!r} has tensors of these names")
        found |= own
    return found


def nested(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`flat` was given, with other tensors in their places."""
    made = _Taken({key: value for key, value in entry.items() if not is_form(value)})
    for key, value in entry.items():
        if is_form(value):
            made[key] = tree.decode(value[NESTED], made)
    order = {key: place for place, key in enumerate(entry)}
    return dict(sorted(made.items(), key=lambda item: order[item[0]]))


def is_form(value: object) -> bool:
    """Whether it says of what form a nested value is."""
    return isinstance(value, dict) and value.keys() == {NESTED}


def outline(entry: Mapping[str, Any]) -> dict[str, Any]:
    """``entry``, flat or not, without the tensors of nested values, for which ``None`` stands."""
    inside = tuple(f"{key}." for key, value in entry.items() if is_form(value))
    return {key: value for key, value in entry.items() if not (inside and key.startswith(inside))}


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with every leaf (what is no list, tuple or dict) changed."""
    if isinstance(value, list):
        return [mapped(each, change) for each in value]
    if isinstance(value, tuple):
        return tuple(mapped(each, change) for each in value)
    if isinstance(value, Mapping):
        return {key: mapped(each, change) for key, each in value.items()}
    return change(value)


def tensors_of(value: Any, kind: type = torch.Tensor) -> Iterator[Any]:
    """The tensors in it, or what of ``kind`` stands for them."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each, kind)
    elif isinstance(value, Mapping):
        for each in list(value.values()):
            yield from tensors_of(each, kind)


def misfits(value: Any, path: str) -> Iterator[str]:
    """What in ``value`` is neither a number, text, ``None`` nor a tensor, with its path."""
    if isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from misfits(each, f"{path}[{place}]")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from misfits(each, f"{path}[{key!r}]")
    elif not (value is None or isinstance(value, torch.Tensor | bool | int | float | str)):
        yield f"{path} is a {type(value).__name__} ({value!r:.80})"


class _Taken(dict[str, Any]):
    """Entries that leave the dictionary when they are read."""

    def __getitem__(self, name: str) -> Any:
        return self.pop(name, None)


def _number(own: dict[str, Any], key: str, leaf: Any, _path: str) -> dict[str, str]:
    name = f"{key}.{len(own)}"
    own[name] = leaf
    return {"$tensor": name}


def _holds(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) and not is_form(value)
