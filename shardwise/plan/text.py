"""Plans as text: frozen dataclasses to plain tables, TOML and JSON, and back, without loss.

``None`` is ``"none"`` in TOML, which has no null. A ``torch.dtype`` is written by name. A field with several possible
classes (``shard.packing``) has the class in ``kind``. A tuple of dataclasses (``shard.groups``) is a list of tables.
Objects of the program (an architecture) have no text form.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from shardwise.core.base.text_file import replace_text
from shardwise.core.base.validate import as_path, did_you_mean, short_repr

NONE = "none"
P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class _Object:
    """An object of the user's program, shown by its repr and compared by equality."""

    own: Any


def to_tables(part: Any, objects: bool = False) -> dict[str, Any]:
    """Return a dataclass as nested dictionaries of plain values.

    Args:
        part: the dataclass.
        objects: show objects of the user's program by their repr, for a reader.

    Raises:
        ValueError: a field is such an object, and ``objects`` is False.
    """
    tables: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            hint = get_type_hints(type(part))[field.name]
            kind = {"kind": type(value).__name__} if len(_classes(hint)) > 1 else {}
            tables[field.name] = kind | to_tables(value, objects)
        else:
            tables[field.name] = _plain(f"{type(part).__name__}.{field.name}", value, objects)
    return tables


def _plain(name: str, value: Any, objects: bool) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value):
        return to_tables(value, objects)
    if isinstance(value, tuple | list):
        return [_plain(name, each, objects) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if objects:
        return _Object(value)
    raise ValueError(
        f"{name}={value!r:.80} has no text form; leave it out of the file, and set it in the program with plan.but()"
    )


def from_tables(kind: type[P], tables: Mapping[str, Any], where: str, base: Any = None) -> P:
    """Return a dataclass with the fields of ``tables``. Missing fields come from ``base`` or have their defaults.

    Args:
        kind: the class of the dataclass.
        tables: nested dictionaries, as from :func:`to_tables`; ``"none"`` stands for ``None``, and ``"inf"`` for
            infinity.
        where: the file, or the file and the path in it, for errors.
        base: an object of the same class, or ``None``.

    Raises:
        ValueError: a field is unknown, missing or invalid; the message has ``where`` and the field.
    """
    hints, fields = get_type_hints(kind), {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in tables:
        if name not in fields:
            hint = did_you_mean(name, fields, f"the fields are {', '.join(fields)}", 0.6)
            raise ValueError(f"{where}: {name!r} is not a field of {kind.__name__}; {hint}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        old = getattr(base, name, None)
        if name in tables:
            values[name] = _value(hints[name], tables[name], f"{where}: {name}", old)
        elif base is not None:
            values[name] = old
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            advice = ", or start from stage = 3" if kind.__name__ == "Plan" else ""
            raise ValueError(f"{where}: the field {name!r} of {kind.__name__} is missing; give it{advice}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{where}: {problem}") from None


def _value(hint: Any, value: Any, where: str, old: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    may_be_none = type(None) in options or Any in options
    if value is None or (value == NONE and may_be_none):
        if may_be_none:
            return None
        raise ValueError(f"{where}=none: the field needs a value; give one")
    if Any in options:
        raise ValueError(
            f"{where}={short_repr(value)}: the field takes an object of the program; set it there with plan.but()"
        )
    if classes := _classes(hint):
        return _part(classes, value, where, old)
    if torch.dtype in options:
        dtype = getattr(torch, str(value).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{where}={short_repr(value)}: give the name of a dtype, such as 'bfloat16'")
        return dtype
    for option in options:
        if get_origin(option) is tuple:
            parts = _classes(get_args(option)[0])
            items = _tuple(value, where)
            return tuple(_part(parts, each, f"{where}[{i}]", None) for i, each in enumerate(items)) if parts else items
    if float in options:
        return math.inf if value == "inf" else value
    return value


def _part(classes: dict[str, type], value: Any, where: str, old: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}={short_repr(value)}: give a table of fields")
    fields = dict(value)
    name = fields.pop("kind", None) if len(classes) > 1 else None
    if len(classes) > 1 and name is None and type(old).__name__ in classes:
        name = type(old).__name__
    kind = classes.get(str(name)) if len(classes) > 1 else next(iter(classes.values()))
    if kind is None:
        raise ValueError(f"{where}.kind={short_repr(name)}: give one of {', '.join(classes)}")
    return from_tables(kind, fields, where, old if type(old) is kind else None)


def _tuple(value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}={short_repr(value)}: give a list")
    return tuple(_tuple(each, where) if isinstance(each, list | tuple) else each for each in value)


def _classes(hint: Any) -> dict[str, type]:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {each.__name__: each for each in options if isinstance(each, type) and dataclasses.is_dataclass(each)}


def toml(tables: Mapping[str, Any], path: str = "") -> str:
    """Return tables as TOML, one value a line."""
    plain = [f"{name} = {_toml(value)}" for name, value in tables.items() if not isinstance(value, Mapping)]
    head = [f"[{path}]"] if path and (plain or not tables) else []
    parts = ["\n".join([*head, *plain]) + "\n"] if head or plain else []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            parts.append(toml(value, f"{path}.{name}" if path else name))
    return "\n".join(parts)


def _toml(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_toml(each)}' for name, each in value.items())}}}"
    if isinstance(value, _Object):
        return _toml(f"{value.own!r:.80}")
    return repr(value)  # numbers; infinity is inf there, too


def write(path: str | os.PathLike[str], tables: Mapping[str, Any]) -> None:
    """Write tables to a TOML or JSON file, atomically.

    Raises:
        ValueError: the file name has another ending.
    """
    target = Path(as_path("path", path, "a .toml or .json file"))
    if _form(target) == ".toml":
        text = toml(tables)
    else:
        finite = json.loads(json.dumps(tables), parse_constant=lambda name: "inf")
        text = json.dumps(finite, indent=2, ensure_ascii=False) + "\n"
    replace_text(target, text)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the tables of a TOML or JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file name has another ending, or the content is not of that format.
    """
    source = Path(as_path("path", path, "a .toml or .json file"))
    form = _form(source)
    try:
        text = source.read_bytes().decode("utf-8")
        table = tomllib.loads(text) if form == ".toml" else json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{source}: is not {form[1:].upper()}: {problem}") from None
    if not isinstance(table, dict):
        raise ValueError(
            f"{source}: holds {short_repr(table)}, which is not a table of a plan's fields; give one, such as stage = 3"
        )
    return table


def _form(path: Path) -> str:
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"{path} is neither .toml nor .json; give a file with one of these endings")
    return path.suffix


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return table


def differences(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield lines such as ``"grad.max_norm: 0.0 -> 1.0"`` for values that differ."""
    for name in dict.fromkeys([*one, *other]):
        ours, theirs = one.get(name), other.get(name)
        where = f"{path}.{name}" if path else name
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from differences(ours, theirs, where)
        elif ours != theirs:
            yield f"{where}: {_toml(ours)} -> {_toml(theirs)}"
