"""A checkpoint under other names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.core.checkpoint.formats.lazy import Entry, LazySource, entries_of
from shardwise.core.checkpoint.source import CheckpointSource

__all__ = ["renamed"]

SHOWN = 4


def renamed(source: CheckpointSource, rules: Mapping[str, str]) -> LazySource:
    """``source`` with other names of parameters and buffers, in the model and in the optimizers.

    Args:
        source: any checkpoint.
        rules: old to new. An old name that the checkpoint has stands for that tensor alone; any other is a regular
            expression, whose every match in every name is replaced (``re.sub``: ``^`` and ``$`` are its ends, the new
            one may have ``\\1``). They are applied in order.

    Raises:
        ValueError: a rule fits no name or is no regular expression, or two tensors would get one name.
    """
    old = _names(source)
    names = dict.fromkeys(old, "")
    names.update((name, name) for name in old)
    for rule, new in rules.items():
        changed = dict(names)
        for name, now in names.items():
            if rule in old:
                changed[name] = new if name == rule else now
            else:
                changed[name] = _replaced(rule, new, now)
        if changed == names and rule not in old:
            listed = ", ".join(list(old)[:SHOWN])
            raise ValueError(f"rename {rule!r} to {new!r}: no name in the checkpoint fits it; there are {listed}, ...")
        names = changed
    taken: dict[str, str] = {}
    for name, now in names.items():
        if not now or taken.setdefault(now, name) != name:
            raise ValueError(f"rename makes {name!r} into {now!r}, which {taken.get(now, 'nothing')!r} becomes too")
    return _under(source, lambda name: names.get(name, name))


def _replaced(rule: str, new: str, name: str) -> str:
    try:
        return re.sub(rule, new, name)
    except (re.error, IndexError) as error:
        raise ValueError(f"rename {rule!r} to {new!r}: {error}; give a name or a regular expression") from error


def _names(source: CheckpointSource) -> dict[str, None]:
    state = source.state()
    found = [name.removeprefix("model/") for name in source.tensors() if name.startswith("model/")]
    found += [name.split("/", 2)[2].rpartition("/")[0] for name in source.tensors() if name.startswith("optimizer/")]
    for record in state.get("optimizers", []):
        found += [name for group in record["groups"] for name in group["params"]]
    found += [name for pair in state.get("aliases", {}).items() for name in pair]
    found += list(state.get("extra", {}))
    return dict.fromkeys(found)


def _under(source: CheckpointSource, new: Callable[[str], str]) -> LazySource:
    entries: dict[str, Entry] = {}
    for full, entry in entries_of(source).items():
        if full.startswith("model/"):
            full = f"model/{new(full.removeprefix('model/'))}"
        elif full.startswith("optimizer/"):
            _, index, path = full.split("/", 2)
            name, _, key = path.rpartition("/")
            full = f"optimizer/{index}/{new(name)}/{key}"
        entries[full] = entry
    state = dict(source.state())
    if "optimizers" in state:
        state["optimizers"] = [_record(record, new) for record in state["optimizers"]]
    if "aliases" in state:
        state["aliases"] = {new(other): new(name) for other, name in state["aliases"].items()}
    for key in ("extra", "compute_dtype"):
        if key in state:
            state[key] = {new(name): value for name, value in state[key].items()}
    if "buffers" in state:  # by rank, where ranks differ
        state["buffers"] = [{new(name): path for name, path in own.items()} for own in state["buffers"]]
    return LazySource(
        str(getattr(source, "format", "native")), entries, state, getattr(source, "notes", ()), source.close
    )


def _record(record: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    groups = [{**group, "params": [new(name) for name in group["params"]]} for group in record["groups"]]
    return {**record, "groups": groups, "small": {new(name): value for name, value in record["small"].items()}}
