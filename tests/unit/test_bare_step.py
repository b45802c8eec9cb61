"""A tile is stepped without the hooks of the user's optimizer, which looks as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.update.tiles import BareStep


class Borrows(torch.optim.SGD):
    """Its groups are another's."""

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._groups = groups


class Counts(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        assert type(self).__name__ == "Counts" and isinstance(self, Counts)
        return super().step(closure)


def own_step(self: torch.optim.Optimizer) -> None:
    for group in self.param_groups:
        group["params"][0].data.sub_(group["lr"] * group["params"][0].grad)


def replaced(optimizer: torch.optim.Optimizer, bound: bool) -> torch.optim.Optimizer:
    if bound:
        optimizer.step = own_step.__get__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step = lambda: own_step(optimizer)  # type: ignore[assignment, misc, return-value]
    return optimizer


CASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "its class's": lambda params: Counts(params, lr=0.5),
    "a method in its place": lambda params: replaced(torch.optim.SGD(params, lr=0.5), True),
    "a function in its place": lambda params: replaced(torch.optim.SGD(params, lr=0.5), False),
    "a property": lambda params: Borrows(params, lr=0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_a_group_of_its_own_is_stepped_without_hooks(case: str) -> None:
    optimizer = CASES[case]([nn.Parameter(torch.ones(2))])
    hooks: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    groups, before = optimizer.param_groups, optimizer._optimizer_step_pre_hooks
    value = nn.Parameter(torch.ones(2))
    value.grad = torch.ones(2)
    bare = BareStep(optimizer)
    with bare.hidden():
        bare.step({**groups[0], "params": [value]})
    assert value.tolist() == [0.5, 0.5] and groups[0]["params"][0].tolist() == [1.0, 1.0]
    assert optimizer.param_groups is groups and optimizer._optimizer_step_pre_hooks is before and not hooks
    assert getattr(optimizer, "calls", 1) == 1
