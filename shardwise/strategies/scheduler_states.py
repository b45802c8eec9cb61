"""States of learning-rate schedulers, which Lightning hands from a checkpoint to whatever scheduler there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.core.base.remarks import warn_user
from shardwise.core.checkpoint.options import check_scheduler
from shardwise.core.checkpoint.schedulers import SavedScheduler, inner_scheduler, regrouped, scheduler_class

__all__ = ["CLASSES", "check_schedulers", "fit_schedulers", "scheduler_classes"]

CLASSES = "lr_scheduler_classes"
"""The entry beside Lightning's ``lr_schedulers``."""


def scheduler_classes(configs: Sequence[Any]) -> list[str]:
    """Of Lightning's ``LRSchedulerConfig``."""
    return [scheduler_class(config.scheduler) for config in configs]


def _saved(configs: Sequence[Any], found: Mapping[str, Any]) -> Iterator[tuple[int, Any, SavedScheduler]]:
    """Number, scheduler, and the state that ``found`` has for it."""
    states = found.get("lr_schedulers") or ()
    kinds = [*(found.get(CLASSES) or ()), *[""] * len(states)]
    for number, (config, state, kind) in enumerate(zip(configs, states, kinds, strict=False)):
        yield number, config.scheduler, SavedScheduler(state, kind)


def check_schedulers(configs: Sequence[Any], found: Mapping[str, Any], strict: bool) -> None:
    """Whether the states in ``found["lr_schedulers"]`` are those of the schedulers.

    Args:
        configs: Lightning's ``LRSchedulerConfig``.
        found: Lightning's dictionary.
        strict: a state of another class, or for another number of param groups, is an error.

    Raises:
        ValueError: a state is not; or it holds what none of its class holds.
    """
    for number, scheduler, saved in _saved(configs, found):
        reason = saved.misfit(scheduler)
        if reason is not None and strict:
            raise ValueError(
                f"learning-rate scheduler {number}: {reason}; return from configure_optimizers what was saved, or set "
                "strict_loading=False to keep its own state"
            )
        if reason is None or saved.misfit(scheduler, groups_alike=False) is None:
            check_scheduler(scheduler, saved.state, f"learning-rate scheduler {number}")


def fit_schedulers(configs: Sequence[Any], found: dict[str, Any]) -> None:
    """States that were checked as loading is not strict: a scheduler whose class another state is of gets its own
    instead, with a warning; and one of an optimizer with other param groups gets the learning rates of these."""
    states = list(found.get("lr_schedulers") or ())
    for number, scheduler, saved in _saved(configs, found):
        reason = saved.misfit(scheduler)
        if reason is None:
            continue
        if saved.misfit(scheduler, groups_alike=False) is None:
            groups = inner_scheduler(scheduler).optimizer.param_groups
            states[number] = regrouped(saved.state, scheduler.state_dict(), groups, [None] * len(groups))
        else:
            warn_user(f"learning-rate scheduler {number}: {reason}; it stays as it is")
            states[number] = scheduler.state_dict()
    if states:
        found["lr_schedulers"] = states
