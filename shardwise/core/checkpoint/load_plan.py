"""The load plan: how the names, shapes, rows, param groups and optimizer state of a checkpoint fit a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch

from shardwise.core.base import tree
from shardwise.core.base.state_dict_names import is_one_kind
from shardwise.core.base.validate import names_text, printable
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, LazySource, blocks, entries_of, renamed, with_names
from shardwise.core.checkpoint.formats.native import NativeSource
from shardwise.core.checkpoint.formats.optimizer_state import group_options, match_by_shape, optimizer_entries
from shardwise.core.checkpoint.native_format import PIECE_BYTES
from shardwise.core.checkpoint.source import CheckpointSource, TensorInfo, parameter_of
from shardwise.core.checkpoint.training_run import LocalState, RunOptimizer
from shardwise.core.checks.param_groups import same_value
from shardwise.core.engine.checkpoint_state import Stored
from shardwise.core.optim.state_form import SavedForm, StateForm, options_for
from shardwise.core.parallel.tensor import Part
from shardwise.core.parallel.tensor.stored_order import full_runs, read_part

LoadPart = Literal["all", "model", "optimizer"]


class LoadPlan:
    """How the names of a checkpoint fit those of a run.

    Args:
        source: the checkpoint.
        local_state: names, shapes and optimizers of the run.
        strict: whether missing and unexpected names are errors.
        part: compare (and then load) everything, or only the model, or only the optimizers.

    Raises:
        ValueError: names or shapes do not fit. The message has up to six missing and six unexpected names.
    """

    def __init__(self, source: CheckpointSource, local_state: LocalState, strict: bool, part: LoadPart = "all") -> None:
        self.source, self.local_state, self.state = source, local_state, source.state()
        self.part = part
        self.infos = source.tensors()
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._wrong: list[str] = []
        self._aliases: dict[str, str] = self.state.get("aliases", {})
        shapes = local_state.model_shapes()
        self._shapes = {name: shape.shape for name, shape in shapes.items()}
        self._dtypes = {names[0]: shapes[names[0]].dtype for names in local_state.names}
        self._known = self._names_in_source()
        self.stored_name: dict[str, str | None] = {names[0]: self._stored(names) for names in local_state.names}
        """The names of parameters in the checkpoint, by their names in the run."""
        self.adopted: dict[int, AdoptedState] = {}
        """The state that optimizers load, by index. The state of other optimizers is unchanged."""
        self.notes: list[str] = []
        """Sentences about optimizer state that is ignored or missing, or that no name fits."""
        refused: list[str] = []
        if part != "optimizer":
            self._match_model()
        # A checkpoint of another format without optimizers has only weights, so optimizers are unchanged.
        saved = bool(self.state.get("optimizers")) or getattr(source, "format", "native") == "native"
        if part != "model" and local_state.optimizers and saved:
            plan = OptimizerLoadPlan(source, local_state, self.stored_name, strict, self._fitting)
            self.adopted, refused = plan.adopted, plan.refused
            self.notes += plan.notes
            self.missing += plan.missing
            self.unexpected += plan.unexpected
        self._state_of = {name: entry for each in self.adopted.values() for name, entry in each.state.items()}
        if self._wrong or (strict and (self.missing or self.unexpected or refused)):
            self._refuse(refused if strict else [], strict)

    def _refuse(self, refused: list[str], strict: bool) -> None:
        ours = "optimizer" if self.part == "optimizer" else "model"
        lists = [("missing from the checkpoint", self.missing), (f"not in the {ours}", self.unexpected)]
        lines = [f"{what}: {names_text(names)}" for what, names in lists if names and strict]
        listed = "\n  ".join([*lines, *refused, *filter(None, [names_text(self._wrong, "\n  ")])])
        advice = "\nuse another directory if this is the checkpoint of another model"
        advice += "" if self._wrong else "; strict=False loads what fits"
        raise ValueError(printable(f"the checkpoint does not fit, nothing was loaded:\n  {listed}{advice}"))

    @property
    def optimizers(self) -> list[int]:
        """Return the indices of the optimizers whose state is replaced."""
        return sorted(self.adopted)

    @property
    def replaces_parameters(self) -> bool:
        """Return True if a load replaces any parameter."""
        return any(self.tensor_of(name) is not None for name in self.stored_name)

    @property
    def staying_parameters(self) -> list[str]:
        """Return the parameters of which a load leaves some values unchanged."""
        partly = (None, *getattr(self.source, "replaced", ()))
        return [name for name in self.stored_name if self.tensor_of(name) in partly]

    @property
    def staying(self) -> list[str]:
        """Return the parameters and optimizers of which a load leaves some values unchanged."""
        optimizers = [
            f"optimizer {each.index}" for each in self.local_state.optimizers if each.index not in self.adopted
        ]
        return self.staying_parameters + optimizers

    def warn(self, where: str) -> None:
        """Warn of optimizer state that was ignored or is missing, and of weights that no parameter has."""
        if self.notes:
            listed = "\n  ".join(self.notes)
            warn_user(printable(f"{where} was loaded partially:\n  {listed}"))

    def _names_in_source(self) -> set[str]:
        """Return the names of parameters: of the model, or of the optimizers if only these are loaded."""
        if self.part != "optimizer":
            return {name.removeprefix("model/") for name in self.infos if name.startswith("model/")}
        listed = {n for saved in self.state.get("optimizers", []) for g in saved["groups"] for n in g["params"]}
        return listed | {parameter_of(name) for name in self.infos if name.startswith("optimizer/")}

    def _stored(self, names: Sequence[str]) -> str | None:
        known = (self._aliases.get(name, name) for name in names)
        return next((name for name in known if name in self._known), None)

    def _match_model(self) -> None:
        expected = set()
        for names in self.local_state.names:
            stored = self.stored_name[names[0]]
            shape = tuple(self._shapes[names[0]])
            if stored is None:
                self.missing.append(names[0])
            else:
                # Other formats hold a tied parameter once, or under each of its names.
                for name in {stored, *(n for n in names if f"model/{n}" in self.infos)}:
                    expected.add(name)
                    self._check(f"model/{name}", shape)
                    self._check_kind(f"model/{name}", self._dtypes[names[0]])
        if self.local_state.names and not any(self.stored_name.values()):
            ours, theirs = (names_text(names) for names in ([*self.stored_name], sorted(self._known)))
            self.notes.append(f"it has no parameter of the model ({ours}), which stays; it has {theirs or 'none'}")
        params, own = {names[0] for names in self.local_state.names}, set(self.local_state.extra_names())
        for name, shape in self._shapes.items():
            if name in params:
                continue
            if f"model/{name}" in self.infos:
                expected.add(name)
                self._check(f"model/{name}", tuple(shape))
            else:
                self.missing.append(name)
        extra = self.state.get("extra", {})
        self.missing += [name for name in self.local_state.extra_names() if name not in extra]
        self.unexpected += [name for name in extra if name not in own]
        there = (name.removeprefix("model/") for name in self.infos if name.startswith("model/"))
        self.unexpected += [name for name in there if name not in expected]

    def _check(self, name: str, shape: tuple[int, ...], owner: str = "model") -> None:
        if self.infos[name].shape != shape:
            advice = self._rows_advice(name, shape)
            self._wrong.append(f"{name}: {self.infos[name].shape} in the checkpoint, {shape} in the {owner}{advice}")

    def _check_kind(self, name: str, dtype: torch.dtype) -> None:
        there = self.infos[name].dtype
        if not is_one_kind(there, dtype):
            self._wrong.append(f"{name}: {there} in the checkpoint, {dtype} in the model: other kinds of numbers")

    def _rows_advice(self, name: str, shape: tuple[int, ...]) -> str:
        there = self.infos[name].shape
        known = name.startswith("model/") and name.removeprefix("model/") in self.stored_name.values()  # not a buffer
        rows = known and bool(shape) and len(there) == len(shape) and there[1:] == shape[1:]
        argument = f"rows={{{name.removeprefix('model/')!r}: 'keep'}}"
        return f" ({argument} takes the rows that both have)" if rows else ""

    def _fitting(
        self, value: Stored, name: str, shape: tuple[int, ...], known: Callable[[tuple[int, ...]], bool]
    ) -> Any:
        """Return element-wise state as it is. If the optimizer trains full parameters, read state of another shape
        (rows and columns of a factored one) if the saved parameter had the same shape or, if the file has no shapes
        (torch's own), ``known`` accepts the shape."""
        info = self.infos[value.name]
        if info.shape != shape and getattr(self.local_state, "other_shapes", False):
            then = self._shape_then(name)
            if then == shape or (then is None and known(info.shape)):
                return self.source.read(value.name, 0, info.numel).reshape(info.shape)
        self._check(value.name, shape, "optimizer")
        return value

    def _shape_then(self, name: str) -> tuple[int, ...] | None:
        for saved in self.state.get("optimizers", []):
            for group in saved["groups"]:
                if name in group["params"] and "shapes" in group:
                    return tuple(group["shapes"][group["params"].index(name)])
        info = self.infos.get(f"model/{name}")
        return None if info is None else info.shape

    def state_of(self, name: str) -> dict[str, Any] | None:
        """Return the optimizer state of a parameter, or ``None`` if the parameter starts without state."""
        return self._state_of.get(name)

    def tensor_of(self, name: str) -> str | None:
        """Return the name of the tensor that replaces a parameter; ``None`` leaves it unchanged."""
        stored = self.stored_name[name]
        return None if stored is None or self.part == "optimizer" else f"model/{stored}"

    def fill(self, name: str, start: int, out: torch.Tensor, part: Part | None = None) -> None:
        """See :class:`shardwise.core.engine.checkpoint_state.Fill`."""
        dtype = self.infos[name].dtype
        replaced: Mapping[str, int] = getattr(self.source, "replaced", {})
        if name in replaced and part is not None:
            for run in full_runs(part, start, start + out.numel()):
                self.fill(name, run.stored, out[run.local - start : run.local - start + run.numel])
            return
        if name in replaced:  # further elements are unchanged
            out = out[: max(0, replaced[name] - start)]
        straight = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        if straight and isinstance(self.source, NativeSource):
            self._read(name, start, out, part)
            return
        row = 1 if part is None else part.shape[part.cut.dim :].numel()
        step, at = PIECE_BYTES // dtype.itemsize, 0
        step = step // row * row or step  # full rows are read together
        while at < out.numel():
            stop = min(at + step - (start + at) % step, out.numel())
            block = torch.empty(stop - at, dtype=dtype, device="cpu")
            self._read(name, start + at, block, part)
            out[at:stop].copy_(block)
            at = stop

    def _read(self, name: str, start: int, out: torch.Tensor, part: Part | None) -> None:
        """Read into ``out`` on the host, in the stored dtype."""
        source = self.source
        if isinstance(source, NativeSource):
            source.read_into(name, start, out) if part is None else source.read_part(name, part, start, out)
            return

        def read(start: int, out: torch.Tensor) -> None:
            out.copy_(source.read(name, start, out.numel()))

        read(start, out) if part is None else read_part(read, None, part, start, out)


Shape = tuple[int, ...]
Fitting = Callable[[Stored, str, Shape, Callable[[Shape], bool]], Any]
"""``fitting(entry, name in the checkpoint, shape in the run, known)`` returns the value for the state, and notes
different shapes. ``known(shape)`` says whether the state may have a shape."""
NAMES = ("params", "param_names")
Options = dict[str, Any]
Links = set[tuple[int, int]]
"""Optimizers of the checkpoint and groups in them, by number."""


@dataclass
class AdoptedState:
    """The state that one optimizer of the run loads.

    Attributes:
        options: the new options, by param group.
        links: by param group, the number of the group that it continues in the checkpoint's optimizer of the same
            index; ``None``: none or several.
        exact: whether the groups are those of the checkpoint.
        state: by name of a parameter in the run, ``{key: small value, or Stored}``; other parameters have no state.
    """

    options: list[Options]
    links: list[int | None]
    exact: bool
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Saved:
    """One optimizer of the checkpoint.

    It has the class (empty if unknown), the groups of names with their options, and the state by name and key.
    """

    kind: str
    groups: list[list[str]]
    options: list[Options]
    entries: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        self.group_of = {name: number for number, group in enumerate(self.groups) for name in group}
        self.names = {*self.entries, *self.group_of}

    def options_of(self, name: str | None) -> Options:
        """Return the options of a parameter's group."""
        group = None if name is None else self.group_of.get(name)
        return {} if group is None else self.options[group]


@dataclass
class _Own:
    """One optimizer of the run.

    ``stored`` has the names in the checkpoint, and ``None`` for a parameter that the checkpoint does not have.
    """

    index: int
    kind: str
    form: StateForm
    optimizer: Any
    groups: list[list[str]]
    stored: list[list[str | None]]
    options: list[Options]

    def parameters(self) -> list[tuple[int, str, str | None]]:
        """Return group, name, and name in the checkpoint of each parameter."""
        return [
            (number, name, stored)
            for number, (names, stored_names) in enumerate(zip(self.groups, self.stored, strict=True))
            for name, stored in zip(names, stored_names, strict=True)
        ]


class OptimizerLoadPlan:
    """How the optimizers of a checkpoint fit those of a run.

    Args:
        source: the checkpoint.
        local_state: names, shapes and optimizers of the run.
        stored_name: the names of parameters in the checkpoint, by their names in the run.
        strict: different groups are an error.
        fitting: see :data:`Fitting`.

    Attributes:
        adopted: the state that optimizers load, by index of the optimizer.
        missing, unexpected: names without a counterpart.
        refused: optimizers with the state of another class, as sentences.
        notes: sentences about state that is ignored or missing.
    """

    def __init__(
        self,
        source: CheckpointSource,
        local_state: LocalState,
        stored_name: Mapping[str, str | None],
        strict: bool,
        fitting: Fitting,
    ) -> None:
        self._local_state, self._stored, self._strict, self._fitting = local_state, stored_name, strict, fitting
        self._shapes = {name: tuple(shape.shape) for name, shape in local_state.model_shapes().items()}
        self._saved = _saved_optimizers(source)
        self.adopted: dict[int, AdoptedState] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.refused: list[str] = []
        self.notes: list[str] = []
        own = {
            stored_name[name]
            for each in local_state.optimizers
            for group in local_state.group_names(each)
            for name in group
        }
        left = [name for saved in self._saved for name in saved.entries if name not in own]
        self.unexpected += [f"optimizer state of {name}" for name in left]
        if left:
            self.notes.append(f"ignored state of parameters that no optimizer has here: {names_text(left)}")
        for each in local_state.optimizers:
            self._match(each)
        for number in range(len(local_state.optimizers), len(self._saved)):
            self.unexpected.append(f"optimizer {number} ({self._saved[number].kind})")

    def _own(self, trainer: RunOptimizer) -> _Own:
        groups = self._local_state.group_names(trainer)
        stored = [[self._stored[name] for name in names] for names in groups]
        options = [{k: v for k, v in group.items() if k not in NAMES} for group in trainer.param_groups]
        kind, form = type(trainer.optimizer).__name__, StateForm(trainer.optimizer)
        return _Own(trainer.index, kind, form, trainer.optimizer, groups, stored, options)

    def _match(self, trainer: RunOptimizer) -> None:
        own = self._own(trainer)
        there = self._saved[own.index] if own.index < len(self._saved) else None
        exact = there is not None and [set(names) for names in own.stored] == [set(names) for names in there.groups]
        if there is None:
            self.missing.append(f"optimizer {own.index} ({own.kind})")
        elif not exact:
            self.missing.append(_other_groups(own, there))
        if not self._saved:
            left = "the checkpoint has no optimizers, so its state stays unchanged"
            self.notes.append(f"optimizer {own.index} ({own.kind}): {left}")
        if not self._saved or (self._strict and not exact):
            return
        holders = _holders(self._saved, own)
        numbers = sorted({*holders.values()})
        accepted = [number for number in numbers if not self._refuses(own, holders, number)]
        links = self._links(own, holders, accepted)
        options, notes = self._options(own, links, exact and own.index in accepted)
        ones = [next(iter(linked)) if len(linked) == 1 else (-1, -1) for linked in links]
        adopted = AdoptedState(options, [group if number == own.index else None for number, group in ones], exact)
        self.adopted[own.index] = adopted
        trained, frozen, without_state = self._local_state.trained(trainer), list[str](), list[str]()
        for group, name, stored in own.parameters():
            number = None if stored is None else holders.get(stored)
            entry = None if number is None or stored is None else self._saved[number].entries.get(stored)
            # Options of the run that stay may need more state than the checkpoint has.
            lacking = number in accepted and entry and self._misfit(own, number, options[group], name, entry)
            if number is None or lacking:
                without_state += [name] if name in trained else []
            elif number not in accepted:
                continue  # a note about all of them exists already
            elif entry is not None and stored is not None and name in trained:
                shape = self._shapes[name]
                known = partial(own.form.has_shape, options[group], shape)
                adopted.state[name] = {
                    key: self._fitting(value, stored, shape, partial(known, key))
                    if isinstance(value, Stored)
                    else value
                    for key, value in entry.items()
                }
            elif entry:
                frozen.append(name)
        lines = [f"these parameters start without state: {names_text(without_state)}"] if without_state else []
        lines += [f"ignored state of parameters that are frozen here: {names_text(frozen)}"] if frozen else []
        self.notes += [f"optimizer {own.index} ({own.kind}): {line}" for line in [*lines, *notes]]

    # ---- which optimizer has the state

    def _misfit(self, own: _Own, number: int, options: Options, name: str, entry: Mapping[str, Any]) -> str | None:
        saved = self._saved[number]
        there = saved.options_of(self._stored[name])
        return own.form.misfit(saved.kind, options, there, SavedForm.of(self._shapes[name], entry))

    def _refuses(self, own: _Own, holders: Mapping[str, int], number: int) -> bool:
        """Return True, and add a note, if this class cannot continue the state of the optimizer ``number``."""
        saved = self._saved[number]
        mine = ((group, name, stored) for group, name, stored in own.parameters() if stored is not None)
        known = [(g, name, saved.entries.get(s, {})) for g, name, s in mine if holders.get(s) == number]
        reasons = []
        for group, name, entry in [each for each in known if each[2]] or known[:1]:
            theirs_too = options_for(own.optimizer, saved.kind, saved.options_of(self._stored[name]))
            reasons.append(self._misfit(own, number, own.options[group] | theirs_too, name, entry))
        called = f"optimizer {own.index} is {own.kind}"
        theirs = saved.kind or "a class that the checkpoint does not name"
        reason = next((each for each in reasons if each is not None), None)
        if reason is None:
            if saved.kind and not own.form.continues(saved.kind):
                self.notes.append(f"{called} and continues with the state of {theirs}, which has the same form")
            return False
        self.refused.append(f"{called}, but the checkpoint has the state of {theirs}: {reason}")
        names = names_text([name for _, name, _ in known])
        self.notes.append(
            f"{called}, but the checkpoint has the state of {theirs} ({reason}); these parameters start without state: "
            f"{names}"
        )
        return True

    # ---- options

    def _links(self, own: _Own, holders: Mapping[str, int], accepted: Collection[int]) -> list[Links]:
        """Return by group of the run the groups of the checkpoint that its parameters were in."""
        links = []
        for stored in own.stored:
            sources = [(holders[name], name) for name in stored if name is not None and holders.get(name) in accepted]
            links.append({(n, self._saved[n].group_of[name]) for n, name in sources if name in self._saved[n].group_of})
        return links

    def _options(self, own: _Own, links: Sequence[Links], exact: bool) -> tuple[list[Options], list[str]]:
        """Return new options by group, and notes on options that stay although the checkpoint has other values."""
        if exact:
            saved = self._saved[own.index]
            new = [options_for(own.optimizer, saved.kind, options) for options in saved.options]
            return [mine | theirs for mine, theirs in zip(own.options, new, strict=True)], []
        theirs = {
            link: options_for(own.optimizer, self._saved[link[0]].kind, self._saved[link[0]].options[link[1]])
            for link in {each for linked in links for each in linked}
        }
        return _merged(own.options, links, theirs)


def _merged(
    own: Sequence[Options], links: Sequence[Links], theirs: Mapping[tuple[int, int], Options]
) -> tuple[list[Options], list[str]]:
    """Return merged options of each group, and notes.

    An option is taken from the checkpoint if all saved groups of the parameters agree on its value, and the run's
    groups of these parameters agree, too.
    """
    merged, notes = [dict(options) for options in own], list[str]()
    for place, linked in enumerate(links):
        relatives = [other for other, also in enumerate(links) if linked & also]
        for key in sorted({key for link in linked for key in theirs[link]}):
            values = [theirs[link][key] for link in sorted(linked) if key in theirs[link]]
            mine = [own[other].get(key) for other in relatives]
            agreed = all(same_value(values[0], value) for value in values[1:])
            if agreed and all(same_value(mine[0], value) for value in mine[1:]):
                merged[place][key] = values[0]
            elif not all(same_value(own[place].get(key), value) for value in values):
                listed = ", ".join(dict.fromkeys(f"{value!r:.40}" for value in values))
                notes.append(f"{key} of group {place} stays {own[place].get(key)!r:.40}, the checkpoint has {listed}")
    return merged, notes


def _holders(saved: Sequence[_Saved], own: _Own) -> dict[str, int]:
    """Return by name in the checkpoint the optimizer that had the parameter; the one with the same number is first."""
    order = sorted(range(len(saved)), key=lambda number: (number != own.index, number))
    holders: dict[str, int] = {}
    for _, _, stored in own.parameters():
        number = next((number for number in order if stored in saved[number].names), None)
        if stored is not None and number is not None:
            holders[stored] = number
    return holders


def _other_groups(own: _Own, there: _Saved) -> str:
    here = [stored or name for _, name, stored in own.parameters()]
    then = [name for group in there.groups for name in group]
    ours, theirs = [n for n in here if n not in {*then}], [n for n in then if n not in {*here}]
    only = [("only here", ours), ("only in the checkpoint", theirs)]
    differing = "".join(f"; {where}: {names_text(names)}" for where, names in only if names)
    return (
        f"optimizer {own.index} with groups of {[len(group) for group in own.groups]} such parameters (the "
        f"checkpoint's have {[len(group) for group in there.groups]}{differing})"
    )


def _saved_optimizers(source: CheckpointSource) -> list[_Saved]:
    """Return the optimizers in the state, each with its entries in the order in which they were created."""
    optimizers = list[_Saved]()
    for number, record in enumerate(source.state().get("optimizers", [])):
        small = record.get("small", {})
        entries = {name: {key: tree.decode(value, None) for key, value in own.items()} for name, own in small.items()}
        for name, own in optimizer_entries(source, number).items():
            stored = {k: Stored(f"optimizer/{number}/{name}/{k}", each.info.dtype) for k, each in own.items()}
            entries.setdefault(name, {}).update(stored)
        place = {key: index for index, key in enumerate(record.get("keys", []))}
        ordered = {
            name: dict(sorted(entry.items(), key=lambda item: place.get(item[0], len(place))))
            for name, entry in entries.items()
        }
        groups = [list(group["params"]) for group in record.get("groups", [])]
        options = [group_options(group) for group in record.get("groups", [])]
        optimizers.append(_Saved(record.get("class", ""), groups, options, ordered))
    return optimizers


# ---- other names and other numbers of rows

Rows = Literal["keep", "zero", "mean"]
"""Values of the rows that a parameter has and its checkpoint does not: as the model has them, zeros, or the mean."""


@dataclass(frozen=True)
class Fit:
    """How the names and rows of a checkpoint are changed for a load.

    Attributes:
        rename: see :func:`shardwise.core.checkpoint.formats.lazy_tensors.renamed`.
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


@dataclass(frozen=True)
class _Change:
    """A change of the rows of a parameter. ``there`` and ``here`` are its shapes in the checkpoint and in the model."""

    there: tuple[int, ...]
    here: tuple[int, ...]
    how: Rows

    @property
    def row(self) -> int:
        """Return the number of elements of one row."""
        return math.prod(self.here[1:])

    def entry(self, entry: Entry, how: Rows) -> Entry:
        """Return the tensor with the number of rows of the model; new rows are zero or the mean."""
        row, rows, dtype = self.row, self.there[0], entry.info.dtype
        known = row * min(rows, self.here[0])

        @cache
        def mean() -> torch.Tensor:  # block by block, in fp64
            total = torch.zeros(row, dtype=torch.float64, device="cpu")
            for start, numel in blocks(entry.info):
                columns = torch.arange(start, start + numel, device="cpu") % row
                total.index_add_(0, columns, entry.read(start, numel).to(torch.float64))
            return total / max(rows, 1)

        def read(start: int, numel: int) -> torch.Tensor:
            out = torch.zeros(numel, dtype=dtype, device="cpu")
            old = max(0, min(start + numel, known) - start)
            if old:
                out[:old] = entry.read(start, old)
            if how == "mean" and old < numel:
                out[old:] = mean()[torch.arange(start + old, start + numel, device="cpu") % row].to(dtype)
            return out

        return Entry(TensorInfo(self.here, dtype), read)


class _Resized(LazySource):
    """A checkpoint with resized parameters.

    Attributes:
        replaced: by tensor, the number of elements that a load replaces; the model keeps its other values.
        resized: a sentence for each parameter.
    """

    replaced: Mapping[str, int]
    resized: tuple[str, ...]


def _with_rows(source: CheckpointSource, local_state: LocalState, rows: Mapping[str, Rows]) -> CheckpointSource:
    entries, state = entries_of(source), dict(source.state())
    records = [dict(record) for record in state.get("optimizers", [])]
    replaced, sentences, done = dict[str, int](), list[str](), dict[str, str]()
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
                replaced[full] = change.row * change.there[0]
        own = [path for path in entries if path.startswith("optimizer/") and parameter_of(path) == stored]
        by_rows = all(entries[path].info.shape in ((), change.there) for path in own)
        by_rows = by_rows and not any(_has_arrays(record, stored) for record in records)
        for path in own:
            if not by_rows:
                del entries[path]
            elif entries[path].info.shape:
                entries[path] = change.entry(entries[path], "zero")
        for record in records:
            record["groups"] = [_shaped(group, stored, change.here) for group in record["groups"]]
            if not by_rows:
                record["small"] = {key: value for key, value in record.get("small", {}).items() if key != stored}
        sentences.append(_sentence(name, change, by_rows))
    state["optimizers"] = records
    if not sentences:
        return source
    made = _Resized(str(getattr(source, "format", "native")), entries, state)
    made.replaced, made.resized = replaced, tuple(sentences)
    return made


def _has_arrays(record: Mapping[str, Any], name: str) -> bool:
    """Return True if an optimizer keeps tensors for a parameter that are not element-wise (factors)."""
    values = (tree.decode(value, None) for value in record.get("small", {}).get(name, {}).values())
    return any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in values)


def _sentence(name: str, change: _Change, by_rows: bool) -> str:
    there, here = change.there[0], change.here[0]
    what = {"keep": "keep the values that they have", "zero": "are zero", "mean": "are the mean of the others"}
    rows = f"the {here - there} new ones {what[change.how]}" if here > there else f"the last {there - here} are dropped"
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
        raise ValueError(f"rows={{{name!r}: {how!r}}} is not a rule for new rows; use 'keep', 'zero' or 'mean'")
    names = next((each for each in local_state.names if name in each), None)
    if names is None:
        listed = names_text([each[0] for each in local_state.names])
        raise ValueError(f"rows={{{name!r}: {how!r}}}: the model has no such parameter; it has {listed}")
    aliases, infos = source.state().get("aliases", {}), source.tensors()
    # If only an optimizer is loaded, the largest tensor of its state is taken as element-wise.
    states = sorted((info.numel, full) for full, info in infos.items() if full.startswith("optimizer/") and info.shape)
    there = {parameter_of(full): infos[full].shape for _, full in states}
    there |= {full.removeprefix("model/"): info.shape for full, info in infos.items() if full.startswith("model/")}
    stored = next((n for n in (aliases.get(each, each) for each in names) if n in there), None)
    here = tuple(local_state.model_shapes()[names[0]].shape)
    if stored is None:
        raise ValueError(f"rows={{{name!r}: {how!r}}}: the checkpoint has no {name}; leave it out")
    if not here or len(there[stored]) != len(here) or there[stored][1:] != here[1:]:
        raise ValueError(
            f"rows={{{name!r}: {how!r}}}: it is {there[stored]} in the checkpoint and {here} in the model, which "
            "differ in more than the number of rows; leave it out"
        )
    return names, stored, _Change(there[stored], here, how)


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
        any_shape = getattr(local_state, "other_shapes", False)
        there = {} if any_shape else _shapes_of(source, each.index)
        assigned = _in_order(theirs, ours, there, shapes)
        if not assigned:
            trained = {name for group in ours for name in group}
            in_model = {own[0]: shapes[own[0]] for own in local_state.names if own[0] in trained}
            assigned = match_by_shape([[(name, there.get(name)) for name in group] for group in theirs], in_model)
        if assigned:
            names[each.index] = assigned
    return with_names(source, names) if names else source


def _shapes_of(source: CheckpointSource, index: int) -> dict[str, Shape]:
    """Return the shapes of parameters whose state seems element-wise."""
    states = optimizer_entries(source, index).items()
    shapes = {name: {entry.info.shape for entry in own.values()} for name, own in states}
    return {name: next(iter(each)) for name, each in shapes.items() if len(each) == 1}


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
