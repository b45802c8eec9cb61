"""State that holds tensors in lists, tuples and dicts (SOAP's matrices, one a dimension), as flat entries.

Flat, each tensor is an entry of its own, ``{"GG": [a, b]}`` becomes ``{"GG": {"$nested": ...}, "GG.0": a, "GG.1": b}``,
so that all that cuts, sends and stores state knows tensors and plain values alone. A list without any is a form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

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
        found[key] = {NESTED: _form(value, f"{key}.", own, leaves)}
        if not own.keys().isdisjoint(entry):
            raise ValueError(f"optimizer state {sorted(own.keys() & entry.keys())}: {key!r} has tensors of these names")
        found |= own
    return found


def nested(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`flat` was given, with other tensors in their places."""
    made = {key: value for key, value in entry.items() if not is_form(value)}
    for key, value in entry.items():
        if is_form(value):
            made[key] = _filled(value[NESTED], made)
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


def _holds(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) and not is_form(value)


def _form(value: Any, path: str, own: dict[str, Any], leaves: tuple[type, ...]) -> Any:
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_form(each, f"{path}{place}.", own, leaves) for place, each in enumerate(value)]}
    if isinstance(value, Mapping):
        items = enumerate(value.items())
        return {"dict": [[key, _form(each, f"{path}{place}.", own, leaves)] for place, (key, each) in items]}
    if isinstance(value, leaves):
        own[path[:-1]] = value
        return {"of": path[:-1]}
    return {"is": value}


def _filled(form: Mapping[str, Any], made: dict[str, Any]) -> Any:
    ((kind, content),) = form.items()
    if kind == "list":
        return [_filled(each, made) for each in content]
    if kind == "tuple":
        return tuple(_filled(each, made) for each in content)
    if kind == "dict":
        return {key: _filled(each, made) for key, each in content}
    return made.pop(content, None) if kind == "of" else content
