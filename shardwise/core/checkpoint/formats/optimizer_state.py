"""Convert optimizer state between its canonical form (by parameter name) and torch's form (by number).

``torch.optim.Optimizer.state_dict()`` numbers the parameters in the order of the groups and has no names. Names come
from one of three sources: the optimizer was built with names (torch keeps them in ``param_names``), the caller lists
them, or only one assignment fits the shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, entry_of_tensor, to_tensor
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource
from shardwise.core.optim.nested_state import flat, mapped, nested


def group_record(names: Sequence[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group as JSON: the names of its parameters and all options of ``group``."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {"params": list(names), "options": tree.encode(options, None)}


def group_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group record as an optimizer has them."""
    return dict(tree.decode(record.get("options", {}), None))


Shapes = Mapping[str, tuple[int, ...]]
FACTORS = ("row", "col")
"""Substrings of the names of a factored state's rows and columns."""


@dataclass
class OptimizerRecord:
    """The JSON part of one optimizer: groups of parameter names with their options, and small state by name and key."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    small: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the record as the state of a checkpoint has it (``keys``: element-wise and small state, in order)."""
        return {"class": "", "groups": self.groups, "small": self.small, "keys": self.keys}

    def add(self, index: int, name: str, state: Mapping[str, Any]) -> dict[str, Entry]:
        """Add the state of one parameter: store small values here, and return tensors as entries."""
        entries = {}
        for key, value in flat(state, (torch.Tensor, Entry)).items():
            if key not in self.keys:
                self.keys.append(key)
            if isinstance(value, Entry):
                entries[f"optimizer/{index}/{name}/{key}"] = value
            elif isinstance(value, torch.Tensor) and value.ndim:
                entries[f"optimizer/{index}/{name}/{key}"] = entry_of_tensor(value)
            else:
                self.small.setdefault(name, {})[key] = tree.encode(value, None)
        return entries

    def lift_scalars(self, index: int, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Return entries with the state of 0-dim parameters, which looks like small state but is element-wise for
        others.
        """
        kinds = {full.rpartition("/")[2] for full in entries}
        if not kinds:  # only 0-dim parameters: all values but the step count
            kinds = {key for key in self.keys if key != "step"}
        lifted = dict(entries)
        for name, values in self.small.items():
            for key in kinds & values.keys():
                value = tree.decode(values[key], None)
                if isinstance(value, torch.Tensor):
                    lifted[f"optimizer/{index}/{name}/{key}"] = entry_of_tensor(value)
                    del values[key]
        return lifted


def records_of(state: Mapping[str, Any]) -> list[OptimizerRecord]:
    """Return the optimizers in the state of a checkpoint."""
    return [
        OptimizerRecord(list(item.get("groups", [])), dict(item.get("small", {})), list(item.get("keys", [])))
        for item in state.get("optimizers", [])
    ]


def optimizer_entries(source: CheckpointSource, index: int) -> dict[str, dict[str, Entry]]:
    """Return the element-wise state of one optimizer, by parameter name and key."""
    states: dict[str, dict[str, Entry]] = {}
    start = f"optimizer/{index}/"
    for full, info in source.tensors().items():
        if full.startswith(start):
            name, _, key = full.removeprefix(start).rpartition("/")
            states.setdefault(name, {})[key] = Entry(info, partial(source.read, full))
    return states


# ---- numbers to names


def from_numbered(
    saved: Mapping[str, Any], index: int, shapes: Shapes, names: Sequence[str] | None, where: str
) -> tuple[dict[str, Entry], OptimizerRecord, list[str]]:
    """Return entries, record and notes of a ``state_dict()`` of a torch optimizer.

    Args:
        saved: ``state`` (number -> key -> tensor, :class:`Entry` or value) and ``param_groups``.
        index: index of this optimizer in the checkpoint.
        shapes: the model's tensors in their order; ``{}`` if the model is unknown.
        names: names of the parameters by number; ``None``: infer them.
        where: the file, for messages.

    Raises:
        CheckpointError: the state is not that of an optimizer, or ``names`` has another length.
    """
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise CheckpointError(f"{where} is not an optimizer's state: it has no param_groups and state")
    numbers = [number for group in groups for number in group["params"]]
    by_number: dict[Any, str] = {}
    notes: list[str] = []
    if names is not None:
        if len(names) != len(numbers):
            raise CheckpointError(f"{where} has {len(numbers)} parameters; {len(names)} names were given")
        by_number = dict(zip(numbers, names, strict=True))
    elif numbers and all(isinstance(number, str) for number in numbers):  # FSDP's full state has names already
        by_number = {name: name for name in numbers}
    elif all("param_names" in group for group in groups):
        by_number = {n: name for group in groups for n, name in zip(group["params"], group["param_names"], strict=True)}
    else:
        numbered = [[(n, _shape_of(state.get(n, {}))) for n in group["params"]] for group in groups]
        by_number = match_by_shape(numbered, shapes)
        if not by_number and numbers:
            notes.append(
                f"{where} numbers its {len(numbers)} parameters, and the shapes do not say which is which; "
                "they are called #0, #1, ... until a run that loads them names them by its own groups, or you do "
                "(parameter_names=, --parameter-names)"
            )
            by_number = {number: f"#{number}" for number in numbers}
    record, entries = OptimizerRecord(), dict[str, Entry]()
    for group in groups:
        record.groups.append(group_record([by_number[n] for n in group["params"]], group))
    for number, values in state.items():
        if number not in by_number:
            notes.append(f"{where} has state for {number!r}, which is in no parameter group; it was left out")
            continue
        entries.update(record.add(index, by_number[number], values))
    return record.lift_scalars(index, entries), record, notes


def _shape_of(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    # Element-wise state has the parameter's shape. A few optimizers also keep smaller factors, so all keys must agree.
    shapes = set()
    if any(name in key for key in values for name in FACTORS):
        return None
    for value in values.values():
        if isinstance(value, Entry):
            shapes.add(value.info.shape)
        elif isinstance(value, torch.Tensor) and value.ndim:
            shapes.add(tuple(value.shape))
    return shapes.pop() if len(shapes) == 1 else None


LoadPart = Sequence[Sequence[tuple[Any, tuple[int, ...] | None]]]


def match_by_shape(groups: LoadPart, shapes: Shapes) -> dict[Any, str]:
    """Return names by number if only one assignment keeps the model's order inside each group; otherwise ``{}``."""
    if len(groups) == 1:
        forward = _embed(groups[0], list(shapes.items()))
        backward = _embed(list(reversed(groups[0])), list(reversed(list(shapes.items()))))
        return forward if forward == backward else {}
    # With several groups, a shape is matched in order if one group has all parameters of that shape in the model.
    in_model = Counter(shapes.values())
    result: dict[Any, str] = {}
    for group in groups:
        for shape, count in Counter(shape for _, shape in group).items():
            elsewhere = any(shape == size for other in groups if other is not group for _, size in other)
            if shape is None or elsewhere or in_model[shape] != count:
                return {}
            named = [name for name, own in shapes.items() if own == shape]
            result.update(zip((n for n, own in group if own == shape), named, strict=True))
    return result


def _embed(
    numbered: Sequence[tuple[Any, tuple[int, ...] | None]], named: Sequence[tuple[str, tuple[int, ...]]]
) -> dict[Any, str]:
    result: dict[Any, str] = {}
    position = 0
    for number, shape in numbered:
        while position < len(named) and shape is not None and named[position][1] != shape:
            position += 1
        if position == len(named):
            return {}
        result[number] = named[position][0]
        position += 1
    return result


# ---- names to numbers


def to_numbered(source: CheckpointSource, index: int) -> tuple[dict[int, dict[str, Entry | Any]], list[dict[str, Any]]]:
    """Return state by number (tensors as entries) and param groups of one optimizer, with torch's numbers.

    If a checkpoint lists no groups, return a single group with the parameters in the order of their state.
    """
    records = records_of(source.state())
    record = records[index] if index < len(records) else OptimizerRecord()
    entries = optimizer_entries(source, index)
    groups = record.groups or [group_record(list(dict.fromkeys([*entries, *record.small])), {})]
    numbers: dict[str, int] = {}
    numbered_groups = []
    for group in groups:
        own = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        numbered_groups.append({**group_options(group), "params": own})
    state: dict[int, dict[str, Entry | Any]] = {}
    for name, number in numbers.items():
        small = {key: tree.decode(value, None) for key, value in record.small.get(name, {}).items()}
        if small or name in entries:
            values = {**small, **entries.get(name, {})}
            order = {key: place for place, key in enumerate(record.keys)}
            state[number] = nested(dict(sorted(values.items(), key=lambda item: order.get(item[0], len(order)))))
    return state, numbered_groups


def in_memory_state(values: Mapping[str, Entry | Any]) -> dict[str, Any]:
    """Return a parameter's state from :func:`to_numbered` with its tensors in memory."""
    return {key: mapped(value, _in_memory) for key, value in values.items()}


def _in_memory(value: Any) -> Any:
    return to_tensor(value) if isinstance(value, Entry) else value


# ---- metadata of numbered state in our own files


def numbered_metadata(source: CheckpointSource, index: int) -> dict[str, Any]:
    """Return values for which torch's form of optimizer state has no place: class, names, shapes and loss scale."""
    records = source.state().get("optimizers", [])
    groups = records[index]["groups"] if index < len(records) else []
    names = [name for group in groups for name in group["params"]]
    known = names if len(set(names)) == len(names) and not any(name.startswith("#") for name in names) else None
    shapes = [group["shapes"] for group in groups] if all("shapes" in group for group in groups) else None
    kind = records[index].get("class", "") if index < len(records) else ""
    return {"class": kind, "names": known, "shapes": shapes, "scaler": source.state().get("scaler")}


def numbered_state(records: Sequence[OptimizerRecord], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a source with ``records``; ``more`` is the :func:`numbered_metadata` of the first one."""
    for group, own in zip(records[0].groups, more.get("shapes") or [], strict=False):
        group["shapes"] = own
    state: dict[str, Any] = {"optimizers": [record.to_json() for record in records]}
    state["optimizers"][0]["class"] = more.get("class", "")
    if more.get("scaler") is not None:
        state["scaler"] = more["scaler"]
    return state
