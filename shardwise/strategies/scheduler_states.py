"""States of learning-rate schedulers, which Lightning hands from a checkpoint to whatever scheduler there is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from shardwise.checkpoint.schedulers import SavedScheduler, inner_scheduler, regrouped, scheduler_class

__all__ = ["CLASSES", "fit_schedulers", "scheduler_classes"]

CLASSES = "lr_scheduler_classes"
"""The entry beside Lightning's ``lr_schedulers``."""


def scheduler_classes(configs: Sequence[Any]) -> list[str]:
    """Of Lightning's ``LRSchedulerConfig``."""
    return [scheduler_class(config.scheduler) for config in configs]


def fit_schedulers(configs: Sequence[Any], found: dict[str, Any], strict: bool) -> None:
    """Whether the states in ``found["lr_schedulers"]`` are those of the schedulers.

    Where loading is not strict, a scheduler whose class another state is of gets its own instead, with a warning; and
    one of an optimizer with other param groups gets the learning rates of these.

    Raises:
        ValueError: a state is of another class, or for another number of param groups.
    """
    states = list(found.get("lr_schedulers") or ())
    kinds = [*(found.get(CLASSES) or ()), *[""] * len(states)]
    for number, (config, state, kind) in enumerate(zip(configs, states, kinds, strict=False)):
        scheduler, saved = config.scheduler, SavedScheduler(state, kind)
        reason = saved.misfit(scheduler)
        if reason is None:
            continue
        if strict:
            raise ValueError(
                f"learning-rate scheduler {number}: {reason}; return from configure_optimizers what was saved, or set "
                "strict_loading=False to keep its own state"
            )
        if saved.misfit(scheduler, groups_alike=False) is None:
            groups = inner_scheduler(scheduler).optimizer.param_groups
            states[number] = regrouped(state, scheduler.state_dict(), groups, [None] * len(groups))
        else:
            warnings.warn(f"learning-rate scheduler {number}: {reason}; it stays as it is", stacklevel=4)
            states[number] = scheduler.state_dict()
    if states:
        found["lr_schedulers"] = states
