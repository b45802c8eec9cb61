"""Learning-rate schedulers: which saved state fits which scheduler, and the state alone in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.base.validate import printable
from shardwise.core.checkpoint.formats.atomic_files import output_file, write_text, write_torch
from shardwise.core.checkpoint.formats.registry import located
from shardwise.core.checkpoint.formats.torch_file import TORCH_SUFFIXES, load_torch
from shardwise.core.checkpoint.formats.trainer import scheduler_files
from shardwise.core.checkpoint.input_checks import checked_tree, read_json, reading, saving
from shardwise.core.checkpoint.load_plan import LoadPlan
from shardwise.core.checkpoint.plain_values import check_scheduler
from shardwise.core.checkpoint.source import CheckpointError, StateTensors
from shardwise.core.checkpoint.training_run import Run, RunOptimizer

MOST_VALUES = 1 << 20


BASES = {"LRScheduler", "_LRScheduler", "object"}
UNUSED = {"verbose"}
"""Entries that some versions of torch have."""
ONE_A_GROUP = ("base_lrs", "_last_lr")
"""Lists in the state of torch's schedulers with an entry for each param group."""


@dataclass(frozen=True)
class SavedScheduler:
    """The state of a learning-rate scheduler. ``kind`` is the class, empty if unknown."""

    state: Mapping[str, Any]
    kind: str = ""

    def misfit(self, scheduler: Any, same_groups: bool = True) -> str | None:
        """Return why this is not a state of ``scheduler``, or ``None``.

        The state of a class with the same name, or of a base class, fits. Otherwise the entries decide: those of
        torch's schedulers have to be the same; of others one may have entries that the other lacks, but not both.

        Args:
            scheduler: the scheduler to load the state into.
            same_groups: the optimizer has the same groups as when it was saved.
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
        for key in ONE_A_GROUP if same_groups else ():
            rates, own_rates = self.state.get(key), own.get(key)
            if isinstance(rates, list) and isinstance(own_rates, list) and len(rates) != len(own_rates):
                return f"the state is for {len(rates)} parameter groups, the scheduler's optimizer has {len(own_rates)}"
        return None


def inner_scheduler(scheduler: Any) -> Any:
    """Return the scheduler that accelerate has wrapped, or ``scheduler`` itself."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if hasattr(inner, "load_state_dict") else scheduler


def scheduler_class(scheduler: Any) -> str:
    """Return the name of the scheduler's class."""
    return type(inner_scheduler(scheduler)).__name__


def _entries(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if isinstance(key, str) and not key.startswith("_")} - UNUSED


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def regrouped(
    state: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], links: Sequence[int | None]
) -> dict[str, Any]:
    """Return ``state``, which was saved with other param groups, for the current ones.

    Args:
        state: the saved state.
        own: the scheduler's current state.
        groups: param groups of the optimizer, with restored options.
        links: the saved group that a group continues, by group.
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
    """Write a scheduler's ``state_dict()`` as JSON with its class or, by the suffix, with ``torch.save``.

    Raises:
        CheckpointError: the state is too large or nested too deeply to be read again.
        TypeError: the state has a value that is not a number, string, tensor, list or dict.
        OSError: the file cannot be written; an earlier file is unchanged.
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
    """Read a scheduler's state from our JSON or a torch file (``weights_only=True``). In a directory of Hugging Face's
    Trainer or of accelerate, read that of the first scheduler.

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
            raise CheckpointError(f"{source} holds a {type(state).__name__}, not a scheduler's state; check the path")
        return SavedScheduler(state)
    data = read_json(source)
    if not isinstance(data, dict) or data.get("kind") != "lr_scheduler":
        raise CheckpointError(f"{source} is not a scheduler's file; give the one that save_lr_scheduler wrote")
    with reading(source):
        checked_tree(data, MOST_VALUES, source)
        decoded = tree.decode(data["state"], None)
    if not isinstance(decoded, dict):
        raise CheckpointError(f"{source} holds a {type(decoded).__name__}, not a scheduler's state; check the path")
    return SavedScheduler(decoded, str(data.get("class", "")))


def saved_schedulers(match: LoadPlan) -> list[SavedScheduler]:
    """Return the schedulers of a native checkpoint in order."""
    states = tree.decode(match.state.get("lr_schedulers", []), StateTensors(match.source))
    kinds = [*match.state.get("lr_scheduler_classes", []), *[""] * len(states)]
    return [SavedScheduler(state, kind) for state, kind in zip(states, kinds, strict=False)]


def fitting_state(scheduler: Any, path: str | Path) -> dict[str, Any]:
    """Read a scheduler's state from a file, for ``scheduler.load_state_dict``.

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: the file is damaged or cannot be read.
        ValueError: the state is of another scheduler class, or an entry is of another kind than the scheduler's.
    """
    saved = read_lr_scheduler(path)
    reason = saved.misfit(scheduler)
    if reason is not None:
        raise ValueError(printable(f"{path} does not fit, nothing was loaded: {reason}"))
    check_scheduler(scheduler, saved.state, printable(str(path)))
    return dict(saved.state)


class SchedulerLoadPlan:
    """The states that schedulers load.

    Args:
        match: the load plan; notes on states that are ignored are added to it.
        saved: the schedulers of the checkpoint.
        schedulers: the schedulers of the run.
        strict: the state of another class is an error; otherwise the scheduler is unchanged.

    Raises:
        ValueError: another number of schedulers, (``strict``) the state of another class, or an entry of another kind
            than the scheduler's.
    """

    def __init__(
        self, match: LoadPlan, saved: Sequence[SavedScheduler], schedulers: Sequence[Any], strict: bool
    ) -> None:
        if len(saved) != len(schedulers):
            raise ValueError(
                f"the checkpoint has {len(saved)} learning-rate schedulers and {len(schedulers)} were passed; "
                "pass as many, or none"
            )
        self._match = match
        self._fitting: list[tuple[SavedScheduler, Any]] = []
        wrong = []
        for number, (each, scheduler) in enumerate(zip(saved, schedulers, strict=True)):
            same_groups = all(adopted.exact for adopted in match.adopted.values())
            reason = each.misfit(scheduler, same_groups)
            if reason is None:
                check_scheduler(scheduler, each.state, f"learning-rate scheduler {number}")
                self._fitting.append((each, scheduler))
            else:
                wrong.append(f"learning-rate scheduler {number}: {reason}")
        if wrong and strict:
            listed = "\n  ".join(wrong)
            raise ValueError(
                printable(f"the checkpoint does not fit, nothing was loaded:\n  {listed}\n")
                + "pass the schedulers that were saved, or none"
            )
        match.notes += [f"{line}; it stays as it is" for line in wrong]

    def __bool__(self) -> bool:
        """Return True if any scheduler loads a state."""
        return bool(self._fitting)

    def apply(self, run: Run) -> None:
        """Load the states. Options of the groups must have been restored before."""
        for saved, scheduler in self._fitting:
            trainer = _trainer_of(run, scheduler)
            adopted = None if trainer is None else self._match.adopted.get(trainer.index)
            state = dict(saved.state)
            if trainer is not None and adopted is not None and not adopted.exact:
                state = regrouped(state, scheduler.state_dict(), trainer.param_groups, adopted.links)
            scheduler.load_state_dict(state)


def _trainer_of(run: Run, scheduler: Any) -> RunOptimizer | None:
    """Return the optimizer whose rates the scheduler sets: both have the same list of groups."""
    groups = getattr(getattr(inner_scheduler(scheduler), "optimizer", None), "param_groups", None)
    return next((each for each in run.optimizers if each.param_groups is groups), None)
