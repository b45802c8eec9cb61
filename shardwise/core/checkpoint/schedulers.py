"""Learning-rate schedulers: whose state it is, and their state alone as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.base.printable import printable
from shardwise.core.checkpoint.bounds import checked_tree, read_json, reading, saving
from shardwise.core.checkpoint.formats.detect import located
from shardwise.core.checkpoint.formats.output import output_file, write_text, write_torch
from shardwise.core.checkpoint.formats.torch_file import TORCH_SUFFIXES, load_torch
from shardwise.core.checkpoint.formats.trainer import scheduler_files
from shardwise.core.checkpoint.match import Match
from shardwise.core.checkpoint.options import check_scheduler
from shardwise.core.checkpoint.run import Run, Trainer
from shardwise.core.checkpoint.source import CheckpointError, StateTensors

__all__ = [
    "SavedScheduler",
    "SchedulerMatch",
    "fitting_state",
    "inner_scheduler",
    "read_lr_scheduler",
    "regrouped",
    "saved_schedulers",
    "scheduler_class",
    "write_lr_scheduler",
]

MOST_VALUES = 1 << 20


BASES = {"LRScheduler", "_LRScheduler", "object"}
UNUSED = {"verbose"}
"""Entries that some versions of torch have."""
ONE_A_GROUP = ("base_lrs", "_last_lr")
"""Lists in the state of torch's schedulers with an entry for each param group."""


@dataclass(frozen=True)
class SavedScheduler:
    """The state of a learning-rate scheduler; ``kind`` is its class, empty where that is not known."""

    state: Mapping[str, Any]
    kind: str = ""

    def misfit(self, scheduler: Any, groups_alike: bool = True) -> str | None:
        """Why it is not a state of ``scheduler``; ``None``: it is, as far as that can be known.

        A class of the same name, or one that ``scheduler`` is derived from, is the same. Otherwise the entries decide:
        all of torch's own, and of others that not both have some that the other lacks.

        Args:
            scheduler: that is to take it.
            groups_alike: the optimizer has the groups that it had then.
        """
        if not isinstance(self.state, Mapping):
            return f"the state of a scheduler is a {type(self.state).__name__}"
        own_kind, own = scheduler_class(scheduler), scheduler.state_dict()
        theirs = f"of {self.kind}" if self.kind else f"one with {_listed(_entries(self.state))}"
        ours = own_kind if self.kind else f"{own_kind}, which has {_listed(_entries(own))}"
        same = self.kind in {each.__name__ for each in type(inner_scheduler(scheduler)).__mro__} - BASES
        only_here, only_there = _entries(own) - _entries(self.state), _entries(self.state) - _entries(own)
        of_torch = type(inner_scheduler(scheduler)).__module__.startswith("torch.optim")
        other = self.kind in vars(torch.optim.lr_scheduler) and of_torch
        exactly = bool(self.kind) or of_torch
        if not same and (other or (only_here or only_there if exactly else only_here and only_there)):
            return f"the state is {theirs}, the scheduler a {ours}"
        for key in ONE_A_GROUP if groups_alike else ():
            rates, own_rates = self.state.get(key), own.get(key)
            if isinstance(rates, list) and isinstance(own_rates, list) and len(rates) != len(own_rates):
                return f"the state is for {len(rates)} parameter groups, the scheduler's optimizer has {len(own_rates)}"
        return None


def inner_scheduler(scheduler: Any) -> Any:
    """The scheduler itself, where accelerate has wrapped it."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if hasattr(inner, "load_state_dict") else scheduler


def scheduler_class(scheduler: Any) -> str:
    """The name of its class."""
    return type(inner_scheduler(scheduler)).__name__


def _entries(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if isinstance(key, str) and not key.startswith("_")} - UNUSED


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def regrouped(
    state: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], links: Sequence[int | None]
) -> dict[str, Any]:
    """``state``, made with other param groups, for those of now.

    Args:
        state: as saved.
        own: the scheduler's as it is.
        groups: of the optimizer, whose options are restored already.
        links: by group, the one that it continues.
    """
    changed = dict(state)
    for key, values in state.items():
        mine = own.get(key)
        if key == "_schedulers" and isinstance(mine, list) and len(mine) == len(values):
            changed[key] = [regrouped(each, one, groups, links) for each, one in zip(values, mine, strict=True)]
        elif key == "base_lrs":
            changed[key] = [group.get("initial_lr", rate) for group, rate in zip(groups, mine or values, strict=False)]
        elif key == "_last_lr":
            changed[key] = [group["lr"] for group in groups]
        elif key.endswith(("lrs", "momentums", "lambdas")) and isinstance(mine, list) and len(mine) == len(groups):
            changed[key] = [
                values[link] if link is not None and link < len(values) else one
                for link, one in zip(links, mine, strict=True)
            ]
    return changed


def write_lr_scheduler(scheduler: Any, path: str | Path) -> None:
    """Write a scheduler's ``state_dict()``: as JSON, with its class, or, by the ending, as a file of ``torch.save``.

    Raises:
        CheckpointError: the state is so large, or nested so deeply, that no reader would take it.
        TypeError: the state holds something that is neither a number, text, tensor nor a list or dictionary of such.
        OSError: the file cannot be written; what stood there is still there.
    """
    encoded = tree.encode(scheduler.state_dict(), None)
    if Path(path).suffix in TORCH_SUFFIXES:
        with output_file(Path(path)) as unfinished:
            write_torch(unfinished, tree.decode(encoded, None))
        return
    content = {"kind": "lr_scheduler", "class": scheduler_class(scheduler), "state": encoded}
    with saving(path):
        checked_tree(content, MOST_VALUES, "its state")
    text = json.dumps(content, indent=1, allow_nan=False)
    with output_file(Path(path)) as unfinished:
        write_text(unfinished, text)


def read_lr_scheduler(path: str | Path) -> SavedScheduler:
    """The scheduler state in a file: our JSON, or a torch file (read with ``weights_only=True``). In a directory of
    Hugging Face's Trainer or of accelerate it is that of the first scheduler there.

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: the file is damaged, or is not a scheduler's.
    """
    source = Path(path)
    if source.is_dir():
        source = next(iter(scheduler_files(located(source))), source / "scheduler.pt")
    if source.suffix in TORCH_SUFFIXES:
        state = load_torch(source)
        if not isinstance(state, dict):
            raise CheckpointError(f"{source} holds a {type(state).__name__}, not a scheduler's state")
        return SavedScheduler(state)
    data = read_json(source)
    if not isinstance(data, dict) or data.get("kind") != "lr_scheduler":
        raise CheckpointError(f"{source} is not a scheduler's file; give the one that save_lr_scheduler wrote")
    with reading(source):
        checked_tree(data, MOST_VALUES, source)
        decoded = tree.decode(data["state"], None)
    if not isinstance(decoded, dict):
        raise CheckpointError(f"{source} holds a {type(decoded).__name__}, not a scheduler's state")
    return SavedScheduler(decoded, str(data.get("class", "")))


def saved_schedulers(match: Match) -> list[SavedScheduler]:
    """Those of a checkpoint of our own, in order."""
    states = tree.decode(match.state.get("lr_schedulers", []), StateTensors(match.source))
    kinds = [*match.state.get("lr_scheduler_classes", []), *[""] * len(states)]
    return [SavedScheduler(state, kind) for state, kind in zip(states, kinds, strict=False)]


def fitting_state(scheduler: Any, path: str | Path) -> dict[str, Any]:
    """The state in a scheduler's file, for ``scheduler.load_state_dict``.

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: the file is damaged or cannot be read.
        ValueError: it is the state of another class of scheduler, or an entry is of another kind than the scheduler's.
    """
    saved = read_lr_scheduler(path)
    reason = saved.misfit(scheduler)
    if reason is not None:
        raise ValueError(printable(f"{path} does not fit, nothing was loaded: {reason}"))
    check_scheduler(scheduler, saved.state, printable(str(path)))
    return dict(saved.state)


class SchedulerMatch:
    """What schedulers take over.

    Args:
        match: of the optimizers; what is left out is added to its notes.
        saved: of the checkpoint.
        schedulers: that were given.
        strict: the state of another class is an error; otherwise its scheduler stays as it is.

    Raises:
        ValueError: another number of schedulers, (``strict``) the state of another class, or an entry of another kind
            than the scheduler's.
    """

    def __init__(self, match: Match, saved: Sequence[SavedScheduler], schedulers: Sequence[Any], strict: bool) -> None:
        if len(saved) != len(schedulers):
            raise ValueError(
                f"the checkpoint has {len(saved)} learning-rate schedulers and {len(schedulers)} were given; "
                "give as many, or none"
            )
        self._match = match
        self._fitting: list[tuple[SavedScheduler, Any]] = []
        wrong = []
        for number, (each, scheduler) in enumerate(zip(saved, schedulers, strict=True)):
            alike = all(taken.exact for taken in match.taken.values())
            reason = each.misfit(scheduler, alike)
            if reason is None:
                check_scheduler(scheduler, each.state, f"learning-rate scheduler {number}")
                self._fitting.append((each, scheduler))
            else:
                wrong.append(f"learning-rate scheduler {number}: {reason}")
        if wrong and strict:
            listed = "\n  ".join(wrong)
            raise ValueError(
                printable(f"the checkpoint does not fit, nothing was loaded:\n  {listed}\n")
                + "give the schedulers that were saved, or none"
            )
        match.notes += [f"{line}; it stays as it is" for line in wrong]

    def __bool__(self) -> bool:
        """Whether any scheduler takes over a state."""
        return bool(self._fitting)

    def put_back(self, run: Run) -> None:
        """Change the schedulers; options of the groups are restored already."""
        for saved, scheduler in self._fitting:
            trainer = _trainer_of(run, scheduler)
            taken = None if trainer is None else self._match.taken.get(trainer.index)
            state = dict(saved.state)
            if trainer is not None and taken is not None and not taken.exact:
                state = regrouped(state, scheduler.state_dict(), trainer.param_groups, taken.links)
            scheduler.load_state_dict(state)


def _trainer_of(run: Run, scheduler: Any) -> Trainer | None:
    """The optimizer whose rates it sets: they have the list of groups in common, whatever is around it."""
    groups = getattr(getattr(inner_scheduler(scheduler), "optimizer", None), "param_groups", None)
    return next((each for each in run.optimizers if each.param_groups is groups), None)
