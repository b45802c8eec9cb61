"""Optimizer state with tensors in lists, tuples and dicts (SOAP's matrices, one for each dimension), as flat entries.

In flat form, each tensor is a separate entry: ``{"GG": [a, b]}`` becomes ``{"GG": {"$nested": ...}, "GG.0": a,
"GG.1": b}``, with the structure as JSON (:mod:`shardwise.core.base.tree`). So code that shards, sends and stores state
handles only tensors and plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from shardwise.core.base import tree

NESTED = "$nested"


def flat(entry: Mapping[str, Any], leaves: tuple[type, ...] = (torch.Tensor,)) -> dict[str, Any]:
    """Return ``entry`` with the ``leaves`` of nested values as separate entries.

    Raises:
        ValueError: an entry has the name that a nested tensor gets.
        TypeError: a nested value is not a number, string, None, tensor, list, tuple or dict.
    """
    entries: dict[str, Any] = {}
    for key, value in entry.items():
        if not _holds(value):
            entries[key] = value
            continue
        own: dict[str, Any] = {}
        entries[key] = {NESTED: tree.encode_with(value, partial(_number, own, key), key, leaves)}
        if not own.keys().isdisjoint(entry):
            raise ValueError(f"optimizer state {sorted(own.keys() & entry.keys())}: {key!r} has tensors of these names")
        entries |= own
    return entries


def nested(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Invert :func:`flat`, with the tensors that ``entry`` has now."""
    made = _OnceRead({key: value for key, value in entry.items() if not is_form(value)})
    for key, value in entry.items():
        if is_form(value):
            made[key] = tree.decode(value[NESTED], made)
    order = {key: place for place, key in enumerate(entry)}
    return dict(sorted(made.items(), key=lambda item: order[item[0]]))


def is_form(value: object) -> bool:
    """Return True if ``value`` is the structure of a nested value."""
    return isinstance(value, dict) and value.keys() == {NESTED}


def outline(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``entry``, flat or not, without the tensors of nested values."""
    inside = tuple(f"{key}." for key, value in entry.items() if is_form(value))
    return {key: value for key, value in entry.items() if not (inside and key.startswith(inside))}


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every leaf (not a list, tuple or dict) of ``value``."""
    if isinstance(value, list):
        return [mapped(each, change) for each in value]
    if isinstance(value, tuple):
        return tuple(mapped(each, change) for each in value)
    if isinstance(value, Mapping):
        return {key: mapped(each, change) for key, each in value.items()}
    return change(value)


def tensors_of(value: Any, kind: type = torch.Tensor) -> Iterator[Any]:
    """Iterate over the tensors in ``value``, or over values of ``kind``."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each, kind)
    elif isinstance(value, Mapping):
        for each in list(value.values()):
            yield from tensors_of(each, kind)


def misfits(value: Any, path: str) -> Iterator[str]:
    """Describe values that are not numbers, strings, ``None`` or tensors, with their paths."""
    if isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from misfits(each, f"{path}[{place}]")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from misfits(each, f"{path}[{key!r}]")
    elif not (value is None or isinstance(value, torch.Tensor | bool | int | float | str)):
        yield f"{path} is a {type(value).__name__} ({value!r:.80})"


class _OnceRead(dict[str, Any]):
    """Entries that leave the dictionary when they are read."""

    def __getitem__(self, name: str) -> Any:
        return self.pop(name, None)


def _number(own: dict[str, Any], key: str, leaf: Any, _path: str) -> dict[str, str]:
    name = f"{key}.{len(own)}"
    own[name] = leaf
    return {"$tensor": name}


def _holds(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) and not is_form(value)
