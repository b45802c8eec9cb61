"""Checks of the user's param groups after sharding: groups may be reordered and their options changed, nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any

import torch
from torch import nn

UNSHARDABLE_MODES = ("differentiable", "capturable")
BOUNDS = {"lr": (0.0, math.inf), "eps": (0.0, math.inf), "betas": (0.0, 1.0), "weight_decay": (-math.inf, math.inf)}
"""Valid ranges of options, as in torch's constructors; the upper bound is excluded unless it is infinite."""


def _host_values(option: object) -> list[object]:
    """Return the values of an option, numbers for host tensors; reading a device tensor would wait for the device."""
    values = option if isinstance(option, tuple | list) else (option,)
    return [v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 and v.is_cpu else v for v in values]


def _check_bounds(name: str, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Check the options that a program or a schedule wrote. The optimizer's defaults are always valid.

    Raises:
        ValueError: an option is out of bounds, or not a number.
    """
    for position, group in enumerate(groups):
        for option, (low, high) in BOUNDS.items():
            default = defaults.get(option)
            value = group.get(option, default)
            for each in _host_values(value):
                if isinstance(each, torch.Tensor) or value is default or value == default:
                    continue
                if not (isinstance(each, Real) and (low <= float(each) < high or each == high == math.inf)):
                    bounds = "a number" if low < 0 else f"numbers in [{low:g}, {high:g})"
                    raise ValueError(f"{name} has {option}={value!r} in param group {position}: give {bounds}")


def check_modes(name: str, groups: Sequence[dict[str, Any]]) -> None:
    """Check that no group has a mode that sharding does not support.

    Args:
        name: name of the optimizer, or of the source of the groups.
        groups: the param groups of the optimizer.

    Raises:
        ValueError: a group has such a mode, or an option of a group is NaN, which would be in every parameter after a
            step.
    """
    for position, group in enumerate(groups):
        for option, value in group.items():
            if option != "params" and any(isinstance(v, float) and math.isnan(v) for v in _host_values(value)):
                raise ValueError(f"{name} has {option}={value} in param group {position}: give numbers")
        for mode in UNSHARDABLE_MODES:
            if group.get(mode):
                raise ValueError(
                    f"{name} has {mode}={group[mode]} in param group {position}: shards update in place; set it False"
                )


class ParamGroups:
    """The groups of one optimizer with their present options, at any position in its list.

    Args:
        optimizer: the user's own.

    Attributes:
        now: the groups, in the order at the time of sharding.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.now = list(optimizer.param_groups)
        self._params = [list(group["params"]) for group in self.now]

    def order(self) -> list[int]:
        """Return for each present group of the optimizer its index at the time of sharding.

        Raises:
            RuntimeError: a group was added or removed, or has other parameters.
        """
        name, groups = type(self.optimizer).__name__, self.optimizer.param_groups
        order: list[int] = []
        for position, group in enumerate(groups):
            index = self._index_of(group)
            if index is None or index in order:
                raise RuntimeError(
                    f"param group {position} of {name}.param_groups ('params' with {len(group.get('params', ()))} "
                    "entries) was added after sharding, which packed the parameters: take it out, and add it before"
                )
            # The present dict becomes the group, since schedulers change that one.
            self.now[index] = group
            order.append(index)
        missing = sorted(set(range(len(self.now))) - set(order))
        if missing:
            raise RuntimeError(
                f"param groups {missing} (as numbered before sharding) are missing from {name}.param_groups: put them "
                "back; where their parameters are to be trained no longer, set their learning rate to 0, or build again"
            )
        for position, index in enumerate(order):
            if not _same(groups[position].get("params"), self._params[index]):
                raise RuntimeError(
                    f"'params' of param group {position} of {name} was changed after sharding (it has "
                    f"{len(groups[position].get('params') or ())} entries, it had "
                    f"{len(self._params[index])}): leave it as it is; where parameters are to be trained no longer, "
                    "set the group's learning rate to 0, or build again"
                )
        return order

    def _index_of(self, group: dict[str, Any]) -> int | None:
        for index, own in enumerate(self.now):
            if own is group:
                return index
        # A new dict with the same parameters, as torch's own load_state_dict() makes.
        params = group.get("params")
        return next((i for i, own in enumerate(self._params) if own and _same(params, own)), None)

    def check(self) -> None:
        """Check the groups before a step. The user makes the same edits on all ranks, so all of them raise.

        Raises:
            RuntimeError: see :meth:`order`.
            ValueError: see :func:`check_modes`; or an option is out of bounds.
        """
        self.order()
        name, groups = f"optimizer {type(self.optimizer).__name__}", self.optimizer.param_groups
        check_modes(name, groups)
        _check_bounds(name, groups, self.optimizer.defaults)


def _same(params: object, before: Sequence[nn.Parameter]) -> bool:
    return isinstance(params, list) and len(params) == len(before) and all(map(is_, params, before))


def same_value(a: Any, b: Any) -> bool:
    """Return whether two options are equal. NaN equals NaN, and tensors are compared element by element."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        same = type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    return bool(a == b) or (a != a and b != b)
