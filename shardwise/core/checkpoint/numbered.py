"""Optimizers whose parameters a checkpoint only numbers (``#0``, ``#1``, ...) get the names of a run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.core.checkpoint.formats.lazy import Entry, LazySource, entries_of
from shardwise.core.checkpoint.formats.optimizer_state import match_by_shape
from shardwise.core.checkpoint.run import Holding
from shardwise.core.checkpoint.source import CheckpointSource

__all__ = ["named_like", "with_names"]

Shape = tuple[int, ...]


def named_like(source: CheckpointSource, held: Holding) -> CheckpointSource:
    """``source`` with the names of ``held`` where it has numbers.

    As torch loads a state: the n-th parameter of a group is the n-th of the same group here. Where the groups are
    others the shapes decide, if they leave only one possibility; otherwise the numbers stay, and nothing fits them.
    """
    saved, names = source.state().get("optimizers", []), dict[int, dict[str, str]]()
    shapes = {name: tuple(each.shape) for name, each in held.model_shapes().items()}
    for each in held.optimizers:
        theirs = [list(group["params"]) for group in saved[each.index]["groups"]] if each.index < len(saved) else []
        if not any(name.startswith("#") for group in theirs for name in group):
            continue
        ours = held.group_names(each)
        # Of state in other shapes (rows and columns) none is known to be the parameter's; what fits is seen later.
        whole = getattr(held, "other_shapes", False)
        there = {} if whole else _shapes_of(source, each.index, [name for group in theirs for name in group])
        found = _in_order(theirs, ours, there, shapes)
        if not found:
            trained = {name for group in ours for name in group}
            in_model = {own[0]: shapes[own[0]] for own in held.names if own[0] in trained}
            found = match_by_shape([[(name, there.get(name)) for name in group] for group in theirs], in_model)
        if found:
            names[each.index] = found
    return with_names(source, names) if names else source


def _shapes_of(source: CheckpointSource, index: int, names: Sequence[str]) -> dict[str, Shape]:
    """Of the parameters whose state is element-wise, as far as can be told."""
    found: dict[str, set[Shape]] = {name: set() for name in names}
    start = f"optimizer/{index}/"
    for full, fact in source.tensors().items():
        if full.startswith(start):
            found.setdefault(full.removeprefix(start).rpartition("/")[0], set()).add(fact.shape)
    return {name: next(iter(shapes)) for name, shapes in found.items() if len(shapes) == 1}


def _in_order(
    theirs: Sequence[Sequence[str]],
    ours: Sequence[Sequence[str]],
    there: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
) -> dict[str, str]:
    if [len(group) for group in theirs] != [len(group) for group in ours]:
        return {}
    pairs = [pair for their, our in zip(theirs, ours, strict=True) for pair in zip(their, our, strict=True)]
    return {} if any(there.get(one, shapes[own]) != shapes[own] for one, own in pairs) else dict(pairs)


def with_names(source: CheckpointSource, names: Mapping[int, Mapping[str, str]]) -> LazySource:
    """``source`` with other names of parameters in the optimizers ``names`` (by index)."""
    entries: dict[str, Entry] = {}
    for full, entry in entries_of(source).items():
        kind, _, rest = full.partition("/")
        number, _, path = rest.partition("/")
        if kind == "optimizer" and int(number) in names:
            name, _, key = path.rpartition("/")
            full = f"optimizer/{number}/{names[int(number)].get(name, name)}/{key}"
        entries[full] = entry
    records = list(source.state()["optimizers"])
    for index, own in names.items():
        records[index] = _record(records[index], own)
    return LazySource("renamed", entries, {**source.state(), "optimizers": records})


def _record(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    groups = [{**group, "params": [names.get(name, name) for name in group["params"]]} for group in record["groups"]]
    return {**record, "groups": groups, "small": {names.get(n, n): values for n, values in record["small"].items()}}
