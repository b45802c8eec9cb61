"""While a tile is stepped, in another thread too, the user's optimizer looks as it always does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.update.step_hooks import BareStep
from shardwise.plan import ByTensor, zero
from shardwise.session import build


class Waits(torch.optim.SGD):
    """Its step says that it has begun, and goes on when it may."""

    begun, gate = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.begun.set()
        assert self.gate.wait(60)
        return super().step(closure)


class Meets(torch.autograd.Function):
    """In the backward pass, waits until something is being updated, and runs ``act`` then."""

    act: Callable[[], None]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        assert Waits.begun.wait(60)
        Meets.act()
        Waits.gate.set()
        return grad


class Deep(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self):
            x = Meets.apply(layer(x)) if index == 0 else layer(x)  # type: ignore[no-untyped-call]
        return x


def test_what_a_program_reads_and_adds_while_an_update_runs() -> None:
    model = Deep(*(nn.Linear(6, 6) for _ in range(3)))
    optimizer = Waits(model.parameters(), lr=0.5)
    Waits.gate.set()
    seen: list[Any] = []

    def act() -> None:
        seen.append(optimizer.param_groups is groups and session.optimizers[0].param_groups[0]["lr"] == 0.5)
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    session = build(model, optimizer, zero(3).but(update="backward", packing=ByTensor(persist_numel=0)))
    try:
        groups = optimizer.param_groups
        for _ in range(2):
            Waits.begun.clear()
            Waits.gate.clear()
            Meets.act = staticmethod(act)  # type: ignore[assignment]
            session.backward(session.module(torch.ones(2, 6)).square().mean())
            session.optimizers[0].step()
    finally:
        Waits.gate.set()
        session.close()
    assert seen == [True, "after", True, "after", "after"]


class Registered(torch.optim.SGD):
    """Takes no classes below it."""

    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("one of this name is registered")


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


CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "its class's": (lambda params: Counts(params, lr=0.5), True),
    "a method in its place": (lambda params: replaced(torch.optim.SGD(params, lr=0.5), True), True),
    "a function in its place": (lambda params: replaced(torch.optim.SGD(params, lr=0.5), False), False),
    "not subclassed": (lambda params: Registered(params, lr=0.5), False),
    "a property": (lambda params: Borrows(params, lr=0.5), False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_group_of_its_own_is_stepped_without_hooks(case: str) -> None:
    make, stands_in = CASES[case]
    optimizer = make([nn.Parameter(torch.ones(2))])
    hooks: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    groups, before = optimizer.param_groups, optimizer._optimizer_step_pre_hooks
    value = nn.Parameter(torch.ones(2))
    value.grad = torch.ones(2)
    bare = BareStep(optimizer)
    with bare.hidden():
        bare.step({**groups[0], "params": [value]})
        assert (optimizer.param_groups is groups) == stands_in
        assert (optimizer._optimizer_step_pre_hooks is before) == stands_in
    assert value.tolist() == [0.5, 0.5] and groups[0]["params"][0].tolist() == [1.0, 1.0]
    assert optimizer.param_groups is groups and optimizer._optimizer_step_pre_hooks is before and not hooks
    assert getattr(optimizer, "calls", 1) == 1
