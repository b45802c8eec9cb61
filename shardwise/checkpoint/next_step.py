"""Whether a scheduler can go on with a state, tried on a copy.

A value can be of the right kind and still end training in the next step, after the weights were replaced: 0 for
``step_size``. What a scheduler divides by, or looks up, only the scheduler itself knows.
"""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.checkpoint.schedulers import inner_scheduler

__all__ = ["why_no_step"]

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
        second = [each.after_scheduler] if hasattr(each, "after_scheduler") else []
        if not _are_known([*getattr(each, "_schedulers", ()), *second], owners):
            return False
    return True
