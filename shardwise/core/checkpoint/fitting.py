"""Make a checkpoint fit a model that has other names, numbered parameters, or another number of rows (a vocabulary that
grew)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shardwise.core.base import tree
from shardwise.core.checkpoint.formats.lazy import Entry, LazySource, blocks, entries_of, renamed, with_names
from shardwise.core.checkpoint.formats.optimizer_state import match_by_shape
from shardwise.core.checkpoint.run import LocalState
from shardwise.core.checkpoint.source import CheckpointSource, TensorInfo

__all__ = ["Fit", "Rows"]

Rows = Literal["keep", "zero", "mean"]
SHOWN = 4


@dataclass(frozen=True)
class Fit:
    """How the names and rows of a checkpoint are changed for a load.

    Attributes:
        rename: see :func:`shardwise.core.checkpoint.formats.lazy.renamed`.
        rows: by name of a parameter of the model, the values of rows that the checkpoint does not have: ``"keep"``
            (unchanged), ``"zero"``, or ``"mean"`` (the mean of the checkpoint's rows). The optimizer state of new rows
            is zero; state that is not element-wise (Adafactor's factors) is dropped for the whole parameter. Surplus
            rows of the checkpoint are dropped. Other parameters must have the checkpoint's shape.
    """

    rename: Mapping[str, str] | None = None
    rows: Mapping[str, Rows] | None = None

    def apply(self, source: CheckpointSource, local_state: LocalState) -> CheckpointSource:
        """Return ``source`` as it is loaded into ``local_state``.

        Raises:
            ValueError: a rule that matches nothing, or a parameter that differs in more than the number of rows.
        """
        if self.rename:
            source = renamed(source, self.rename)
        source = named_like(source, local_state)
        return _with_rows(source, local_state, self.rows) if self.rows else source


@dataclass
class _Change:
    """One parameter's rows. ``there`` and ``here`` are the shapes in the checkpoint and in the model."""

    there: tuple[int, ...]
    here: tuple[int, ...]
    how: Rows
    means: list[torch.Tensor] = field(default_factory=list)

    @property
    def row(self) -> int:
        """Return the number of elements of one row."""
        return TensorInfo(self.here[1:], torch.float32).numel

    def entry(self, entry: Entry, how: Rows) -> Entry:
        """Return the tensor with the number of rows of the model; new rows are zero or the mean."""
        known = self.row * min(self.there[0], self.here[0])

        def read(start: int, numel: int) -> torch.Tensor:
            out = torch.zeros(numel, dtype=entry.fact.dtype, device="cpu")
            old = max(0, min(start + numel, known) - start)
            if old:
                out[:old] = entry.read(start, old)
            if how == "mean" and old < numel:
                mean = self._mean(entry)
                out[old:] = mean[torch.arange(start + old, start + numel, device="cpu") % self.row].to(out.dtype)
            return out

        return Entry(TensorInfo(self.here, entry.fact.dtype), read)

    def _mean(self, entry: Entry) -> torch.Tensor:
        """Return the mean of the checkpoint's rows, computed once, block by block, in fp64."""
        if not self.means:
            total = torch.zeros(self.row, dtype=torch.float64, device="cpu")
            for start, numel in blocks(entry.fact):
                places = torch.arange(start, start + numel, device="cpu") % self.row
                total.index_add_(0, places, entry.read(start, numel).to(torch.float64))
            self.means.append(total / max(self.there[0], 1))
        return self.means[0]


class _Resized(LazySource):
    """A checkpoint with resized parameters. ``kept`` has, by tensor, the number of elements that a load replaces; the
    model keeps its values of the others.
    """

    kept: Mapping[str, int]
    resized: tuple[str, ...]


def _with_rows(source: CheckpointSource, local_state: LocalState, rows: Mapping[str, Rows]) -> CheckpointSource:
    entries, state = entries_of(source), dict(source.state())
    records = [dict(record) for record in state.get("optimizers", [])]
    kept, said, done = dict[str, int](), list[str](), dict[str, str]()
    for name, how in rows.items():
        names, stored, change = _change(source, local_state, name, how)
        if rows[done.setdefault(stored, name)] != how:
            raise ValueError(f"rows={dict(rows)}: {name} and {done[stored]} are one parameter; name it once")
        if change.there == change.here or done[stored] != name:
            continue
        # other formats often hold a tied parameter under each of its names
        for full in {f"model/{each}" for each in (stored, *names)} & entries.keys():
            entries[full] = change.entry(entries[full], how)
            if how == "keep":
                kept[full] = change.row * change.there[0]
        own = [path for path in entries if path.startswith("optimizer/") and _parameter_of(path) == stored]
        by_rows = all(entries[path].fact.shape in ((), change.there) for path in own)
        by_rows = by_rows and not any(_has_arrays(record, stored) for record in records)
        for path in own:
            if not by_rows:
                del entries[path]
            elif entries[path].fact.shape:
                entries[path] = change.entry(entries[path], "zero")
        for record in records:
            record["groups"] = [_shaped(group, stored, change.here) for group in record["groups"]]
            if not by_rows:
                record["small"] = {key: value for key, value in record.get("small", {}).items() if key != stored}
        said.append(_sentence(name, change, by_rows))
    state["optimizers"] = records
    if not said:
        return source
    made = _Resized(str(getattr(source, "format", "native")), entries, state)
    made.kept, made.resized = kept, tuple(said)
    return made


def _parameter_of(path: str) -> str:
    """Return the parameter's name in ``optimizer/<number>/<name>/<key>``."""
    return path.split("/", 2)[2].rpartition("/")[0]


def _has_arrays(record: Mapping[str, Any], name: str) -> bool:
    """Return True if an optimizer keeps tensors for a parameter that are not element-wise (factors)."""
    values = (tree.decode(value, None) for value in record.get("small", {}).get(name, {}).values())
    return any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in values)


def _sentence(name: str, change: _Change, by_rows: bool) -> str:
    there, here = change.there[0], change.here[0]
    what = {"keep": "keep the values that they have", "zero": "are zero", "mean": "are the mean of the others"}
    left = f"the last {there - here} are dropped"
    rows = f"the {here - there} new ones {what[change.how]}" if here > there else left
    state = ", their optimizer state is zero" if here > there else ""
    state = state if by_rows else ", its optimizer state, which is not element-wise, is dropped"
    return f"{name}: {there} rows in the checkpoint, {here} in the model: {rows}{state}"


def _shaped(group: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    if "shapes" not in group or name not in group["params"]:
        return dict(group)
    shapes = list(group["shapes"])
    shapes[group["params"].index(name)] = list(shape)
    return {**group, "shapes": shapes}


def _change(
    source: CheckpointSource, local_state: LocalState, name: str, how: Rows
) -> tuple[tuple[str, ...], str, _Change]:
    """Return all names of the parameter in the run, its name in the checkpoint, and what changes."""
    if how not in ("keep", "zero", "mean"):
        raise ValueError(f"rows={{{name!r}: {how!r}}}: known are 'keep', 'zero' and 'mean'")
    names = next((each for each in local_state.names if name in each), None)
    if names is None:
        listed = ", ".join(each[0] for each in local_state.names[:SHOWN])
        raise ValueError(f"rows={{{name!r}: {how!r}}}: the model has no such parameter; it has {listed}, ...")
    aliases, facts = source.state().get("aliases", {}), source.tensors()
    # If only an optimizer is loaded, the largest tensor of its state is taken as element-wise.
    states = sorted((fact.numel, full) for full, fact in facts.items() if full.startswith("optimizer/") and fact.shape)
    there = {_parameter_of(full): facts[full].shape for _, full in states}
    there |= {full.removeprefix("model/"): fact.shape for full, fact in facts.items() if full.startswith("model/")}
    stored = next((n for n in (aliases.get(each, each) for each in names) if n in there), None)
    here = tuple(local_state.model_shapes()[names[0]].shape)
    if stored is None:
        raise ValueError(f"rows={{{name!r}: {how!r}}}: the checkpoint has no {name}")
    if not here or len(there[stored]) != len(here) or there[stored][1:] != here[1:]:
        raise ValueError(
            f"rows={{{name!r}: {how!r}}}: it is {there[stored]} in the checkpoint and {here} in the model, which "
            "differ in more than the number of rows"
        )
    return names, stored, _Change(there[stored], here, how)


Shape = tuple[int, ...]


def named_like(source: CheckpointSource, local_state: LocalState) -> CheckpointSource:
    """Return ``source`` with the names of ``local_state`` in place of numbers (``#0``, ``#1``, ...).

    Like torch, this takes the n-th parameter of a group for the n-th of the same group in the run. If the groups
    differ, shapes decide if only one assignment is possible; otherwise the numbers stay, and no parameter matches them.
    """
    saved, names = source.state().get("optimizers", []), dict[int, dict[str, str]]()
    shapes = {name: tuple(each.shape) for name, each in local_state.model_shapes().items()}
    for each in local_state.optimizers:
        theirs = [list(group["params"]) for group in saved[each.index]["groups"]] if each.index < len(saved) else []
        if not any(name.startswith("#") for group in theirs for name in group):
            continue
        ours = local_state.group_names(each)
        # If state may have other shapes (rows and columns), no shape is known to be the parameter's; the load plan
        # checks it.
        whole = getattr(local_state, "other_shapes", False)
        there = {} if whole else _shapes_of(source, each.index, [name for group in theirs for name in group])
        found = _in_order(theirs, ours, there, shapes)
        if not found:
            trained = {name for group in ours for name in group}
            in_model = {own[0]: shapes[own[0]] for own in local_state.names if own[0] in trained}
            found = match_by_shape([[(name, there.get(name)) for name in group] for group in theirs], in_model)
        if found:
            names[each.index] = found
    return with_names(source, names) if names else source


def _shapes_of(source: CheckpointSource, index: int, names: Sequence[str]) -> dict[str, Shape]:
    """Return the shapes of parameters whose state seems element-wise."""
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
