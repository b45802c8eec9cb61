"""How the learning-rate schedulers of a checkpoint fit those that were given."""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base.printable import printable
from shardwise.core.checkpoint import tree
from shardwise.core.checkpoint.match import Match
from shardwise.core.checkpoint.options import check_scheduler
from shardwise.core.checkpoint.run import Run, Trainer
from shardwise.core.checkpoint.schedulers import SavedScheduler, inner_scheduler, read_lr_scheduler, regrouped
from shardwise.core.checkpoint.source import StateTensors

__all__ = ["SchedulerMatch", "fitting_state", "saved_schedulers", "why_no_step"]


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
        ValueError: it is the state of another class of scheduler, has what none of this class has, or makes its next
            step fail.
    """
    saved = read_lr_scheduler(path)
    reason = saved.misfit(scheduler)
    if reason is not None:
        raise ValueError(printable(f"{path} does not fit, nothing was loaded: {reason}"))
    _check(scheduler, saved.state, printable(str(path)))
    return dict(saved.state)


def _check(scheduler: Any, state: Any, where: str, groups_alike: bool = True) -> None:
    """Whether ``state`` holds what a scheduler of this class has, and it can go on with that.

    Raises:
        ValueError: it does not, or cannot.
    """
    check_scheduler(scheduler, state, where)
    why = why_no_step(scheduler, state) if groups_alike else ""  # otherwise what it takes over is made of both
    if why:
        raise ValueError(f"{where}: {type(scheduler).__name__} cannot go on with the state ({why}); nothing was loaded")


class SchedulerMatch:
    """What schedulers take over.

    Args:
        match: of the optimizers; what is left out is added to its notes.
        saved: of the checkpoint.
        schedulers: that were given.
        strict: the state of another class is an error; otherwise its scheduler stays as it is.

    Raises:
        ValueError: another number of schedulers, (``strict``) the state of another class, or one that has what no
            scheduler of its class has, or with which its next step would fail.
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
                _check(scheduler, each.state, f"learning-rate scheduler {number}", alike)
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


# [Note: The next step is tried]
# A value can be of the right kind and still end training in the next step, after the weights were replaced: 0 for
# `step_size`. What a scheduler divides by, or looks up, only the scheduler itself knows, so a copy takes a step.

KNOWN = ("torch.optim.", "shardwise.")
"""Modules of schedulers whose step sets options of param groups and does nothing else: a user's own may print."""
FUNCTIONS = ("lr_lambdas", "_scale_fn_custom")
"""Attributes that hold functions of the user's, which may count their calls."""


class _Groups(torch.optim.Optimizer):
    """The options of an optimizer's param groups, without its parameters."""

    def __init__(self, optimizer: Any) -> None:
        groups = []
        for each in optimizer.param_groups:
            options = {key: value for key, value in each.items() if key not in ("params", "param_names")}
            groups.append({**copy.deepcopy(options), "params": [torch.zeros(1, device="cpu")]})
        super().__init__(groups, copy.deepcopy(dict(optimizer.defaults)))


def why_no_step(scheduler: Any, state: Mapping[str, Any]) -> str:
    """Why the next step of ``scheduler`` would fail with ``state``; empty if it would not, or that cannot be tried.

    A ``ValueError`` is the scheduler's own word, as at the end of ``OneCycleLR``, and no fault of the state.
    """
    real = inner_scheduler(scheduler)
    owners: dict[int, Any] = {}
    if not _are_known([real], owners):
        return ""
    try:
        groups = {key: _Groups(optimizer) for key, optimizer in owners.items()}
        trial, given = copy.deepcopy(real, dict(groups)), copy.deepcopy(dict(state))
    except Exception:  # something of the user's own that cannot be copied
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial.load_state_dict(given)
            trial.step(*[1.0] if isinstance(trial, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
    except ValueError:
        return ""
    except Exception as error:
        return f"its next step would raise {type(error).__name__}: {error!s:.80}"
    rates = [group["lr"] for each in groups.values() for group in each.param_groups]
    wrong = [type(rate).__name__ for rate in rates if not isinstance(rate, numbers.Real | torch.Tensor)]
    return f"its next step would set a learning rate to a {wrong[0]}" if wrong else ""


def _are_known(schedulers: list[Any], owners: dict[int, Any]) -> bool:
    """Whether a step of each and of those inside it does nothing else; their optimizers are put into ``owners``."""
    for each in schedulers:
        functions = (getattr(each, name, None) for name in FUNCTIONS)
        if not type(each).__module__.startswith(KNOWN) or any(functions):
            return False
        optimizer = getattr(each, "optimizer", None)
        if optimizer is not None:
            owners[id(optimizer)] = optimizer
        if not _are_known(list(getattr(each, "_schedulers", ())), owners):
            return False
    return True
