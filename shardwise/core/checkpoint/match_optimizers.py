"""How the optimizers of a checkpoint fit a run's: state by the parameters' names, options by their groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardwise.core.checkpoint import tree
from shardwise.core.checkpoint.formats.param_groups import group_options
from shardwise.core.checkpoint.run import Holding, Trainer
from shardwise.core.checkpoint.source import CheckpointSource
from shardwise.core.checks.param_groups import same_value
from shardwise.core.engine.fragments import Stored
from shardwise.core.optim.state_form import SavedForm, StateForm, options_for

__all__ = ["OptimizerMatch", "Taken", "shortened"]

MOST_NAMES = 6
Shape = tuple[int, ...]
Fitting = Callable[[Stored, str, Shape, Callable[[Shape], bool]], Any]
"""``fitting(entry, name in the checkpoint, shape here, known)``: what is put into the state, of which ``known`` tells
whether it may have a shape; it notes shapes that differ."""
NAMES = ("params", "param_names")
Options = dict[str, Any]
Links = set[tuple[int, int]]
"""Optimizers of the checkpoint and groups in them, by number."""


def shortened(names: Sequence[str]) -> str:
    """A list of names for a message."""
    rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + rest


@dataclass
class Taken:
    """What one optimizer here takes over.

    Attributes:
        options: by param group, what its options become.
        links: by param group, the number of the group that it continues, of the checkpoint's optimizer with the same
            index; ``None``: of none, or of several.
        exact: the groups are those of the checkpoint.
        state: by the name of a parameter here, ``{key: small value, or Stored}``; the others start anew.
    """

    options: list[Options]
    links: list[int | None]
    exact: bool
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Saved:
    """One optimizer of the checkpoint: its class (empty where it does not say), groups of names with their options, and
    state by name and key."""

    kind: str
    groups: list[list[str]]
    options: list[Options]
    entries: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        self.group_of = {name: number for number, group in enumerate(self.groups) for name in group}
        self.names = {*self.entries, *self.group_of}

    def options_of(self, name: str | None) -> Options:
        """Those of the group that a parameter was in."""
        group = None if name is None else self.group_of.get(name)
        return {} if group is None else self.options[group]


@dataclass
class _Own:
    """One optimizer here; names as here, and those in the checkpoint (``None``: it has no such parameter)."""

    index: int
    kind: str
    form: StateForm
    optimizer: Any
    groups: list[list[str]]
    stored: list[list[str | None]]
    options: list[Options]

    def parameters(self) -> list[tuple[int, str, str | None]]:
        """Group, name, and name in the checkpoint."""
        return [
            (number, name, stored)
            for number, (names, others) in enumerate(zip(self.groups, self.stored, strict=True))
            for name, stored in zip(names, others, strict=True)
        ]


class OptimizerMatch:
    """How the optimizers of a checkpoint fit those of a run.

    Args:
        source: the checkpoint.
        held: the run's names.
        stored_name: by the name of a parameter here, that in the checkpoint.
        strict: other groups will be an error, so what could be taken then is not looked for.
        fitting: see :data:`Fitting`.

    Attributes:
        taken: by index, the optimizers whose state is replaced.
        missing, unexpected: what has no counterpart.
        others: optimizers whose state another class made.
        notes: what is left out or starts anew, for people.
    """

    def __init__(
        self,
        source: CheckpointSource,
        held: Holding,
        stored_name: Mapping[str, str | None],
        strict: bool,
        fitting: Fitting,
    ) -> None:
        self._held, self._stored, self._strict, self._fitting = held, stored_name, strict, fitting
        self._shapes = {name: tuple(shape.shape) for name, shape in held.model_shapes().items()}
        self._saved = _saved_optimizers(source)
        self.taken: dict[int, Taken] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.others: list[str] = []
        self.notes: list[str] = []
        own = {stored_name[name] for each in held.optimizers for group in held.group_names(each) for name in group}
        left = [name for saved in self._saved for name in saved.entries if name not in own]
        self.unexpected += [f"optimizer state of {name}" for name in left]
        if left:
            self.notes.append(f"state of parameters that no optimizer has here is left out: {shortened(left)}")
        for each in held.optimizers:
            self._match(each)
        for number in range(len(held.optimizers), len(self._saved)):
            self.unexpected.append(f"optimizer {number} ({self._saved[number].kind})")

    def _own(self, trainer: Trainer) -> _Own:
        groups = self._held.group_names(trainer)
        stored = [[self._stored[name] for name in names] for names in groups]
        options = [{k: v for k, v in group.items() if k not in NAMES} for group in trainer.param_groups]
        kind, form = type(trainer.optimizer).__name__, StateForm(trainer.optimizer)
        return _Own(trainer.index, kind, form, trainer.optimizer, groups, stored, options)

    def _match(self, trainer: Trainer) -> None:
        own = self._own(trainer)
        there = self._saved[own.index] if own.index < len(self._saved) else None
        exact = there is not None and [set(names) for names in own.stored] == [set(names) for names in there.groups]
        if there is None:
            self.missing.append(f"optimizer {own.index} ({own.kind})")
        elif not exact:
            self.missing.append(_other_groups(own, there))
        if not self._saved:
            left = "the checkpoint has no optimizers, so all of its state stays"
            self.notes.append(f"optimizer {own.index} ({own.kind}): {left}")
        if not self._saved or (self._strict and not exact):
            return
        holders = _holders(self._saved, own)
        numbers = sorted({*holders.values()})
        accepted = [number for number in numbers if not self._refuses(own, holders, number)]
        links = self._links(own, holders, accepted)
        options, kept = self._options(own, links, exact and own.index in accepted)
        ones = [next(iter(linked)) if len(linked) == 1 else (-1, -1) for linked in links]
        taken = Taken(options, [group if number == own.index else None for number, group in ones], exact)
        self.taken[own.index] = taken
        trained, frozen, anew = self._held.trained(trainer), list[str](), list[str]()
        for group, name, stored in own.parameters():
            number = None if stored is None else holders.get(stored)
            entry = None if number is None or stored is None else self._saved[number].entries.get(stored)
            # Options that stay may ask for more state than there is.
            lacking = number in accepted and entry and self._misfit(own, number, options[group], name, entry)
            if number is None or lacking:
                anew += [name] if name in trained else []
            elif number not in accepted:
                continue  # that has been noted of all of them
            elif entry is not None and stored is not None and name in trained:
                known = partial(own.form.has_shape, options[group], self._shapes[name])
                taken.state[name] = {k: self._value(v, stored, name, partial(known, k)) for k, v in entry.items()}
            elif entry:
                frozen.append(name)
        lines = [f"these parameters start anew: {shortened(anew)}"] if anew else []
        lines += [f"state of parameters that are frozen here is left out: {shortened(frozen)}"] if frozen else []
        self.notes += [f"optimizer {own.index} ({own.kind}): {line}" for line in [*lines, *kept]]

    def _value(self, value: Any, stored: str, name: str, known: Callable[[Shape], bool]) -> Any:
        return self._fitting(value, stored, self._shapes[name], known) if isinstance(value, Stored) else value

    # ---- whose state it is

    def _misfit(self, own: _Own, number: int, options: Options, name: str, entry: Mapping[str, Any]) -> str | None:
        saved = self._saved[number]
        there = saved.options_of(self._stored[name])
        return own.form.misfit(saved.kind, options, there, SavedForm.of(self._shapes[name], entry))

    def _refuses(self, own: _Own, holders: Mapping[str, int], number: int) -> bool:
        """Whether the state of the checkpoint's optimizer ``number`` is not one of this class; that is noted."""
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
                self.notes.append(f"{called} and goes on with the state of {theirs}, which has the same form")
            return False
        self.others.append(f"{called}, and its state there is of {theirs}: {reason}")
        names = shortened([name for _, name, _ in known])
        self.notes.append(f"{called}, and the state there is of {theirs} ({reason}); these start anew: {names}")
        return True

    # ---- options

    def _links(self, own: _Own, holders: Mapping[str, int], accepted: Collection[int]) -> list[Links]:
        """By group here, the groups in the checkpoint that its parameters were in."""
        links = []
        for stored in own.stored:
            found = [(holders[name], name) for name in stored if name is not None and holders.get(name) in accepted]
            links.append({(n, self._saved[n].group_of[name]) for n, name in found if name in self._saved[n].group_of})
        return links

    def _options(self, own: _Own, links: Sequence[Links], exact: bool) -> tuple[list[Options], list[str]]:
        """By group what its options become, and what is said of those that stay although the checkpoint has others."""
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
    """An option is the checkpoint's where all groups that the parameters were in have one value of it, and the groups
    here that these parameters are in now do not differ in it; otherwise it stays."""
    merged, kept = [dict(options) for options in own], list[str]()
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
                kept.append(f"{key} of group {place} stays {own[place].get(key)!r:.40}, the checkpoint has {listed}")
    return merged, kept


def _holders(saved: Sequence[_Saved], own: _Own) -> dict[str, int]:
    """By a parameter's name in the checkpoint, which of its optimizers had it; first the one with the same number."""
    order = sorted(range(len(saved)), key=lambda number: (number != own.index, number))
    found: dict[str, int] = {}
    for _, _, stored in own.parameters():
        number = next((number for number in order if stored in saved[number].names), None)
        if stored is not None and number is not None:
            found[stored] = number
    return found


def _other_groups(own: _Own, there: _Saved) -> str:
    here = [stored or name for _, name, stored in own.parameters()]
    then = [name for group in there.groups for name in group]
    only = [("only here", [n for n in here if n not in {*then}]), ("only there", [n for n in then if n not in {*here}])]
    differing = "".join(f"; {where}: {shortened(names)}" for where, names in only if names)
    return (
        f"optimizer {own.index} with groups of {[len(group) for group in own.groups]} such parameters (the "
        f"checkpoint's have {[len(group) for group in there.groups]}{differing})"
    )


def _saved_optimizers(source: CheckpointSource) -> list[_Saved]:
    """Those that the state lists, each with its entries in the order in which they were made."""
    facts, found = source.tensors(), list[_Saved]()
    for number, record in enumerate(source.state().get("optimizers", [])):
        small = record.get("small", {})
        entries = {name: {key: tree.decode(value, None) for key, value in own.items()} for name, own in small.items()}
        start = f"optimizer/{number}/"
        for full in (name for name in facts if name.startswith(start)):
            name, _, key = full.removeprefix(start).rpartition("/")
            entries.setdefault(name, {})[key] = Stored(full, facts[full].dtype)
        place = {key: index for index, key in enumerate(record.get("keys", []))}
        ordered = {
            name: dict(sorted(entry.items(), key=lambda item: place.get(item[0], len(place))))
            for name, entry in entries.items()
        }
        groups = [list(group["params"]) for group in record.get("groups", [])]
        options = [group_options(group) for group in record.get("groups", [])]
        found.append(_Saved(record.get("class", ""), groups, options, ordered))
    return found
