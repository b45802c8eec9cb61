"""An optimizer that cannot be sharded is refused on every rank, and the model and the optimizer are as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.engine_setup import one_mesh


class Normed(torch.optim.Optimizer):
    """Of no known name: each parameter moves by its gradient's direction."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / param.grad.norm())


class Counting(Normed):
    """Of no known name: its steps become smaller with each call."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / self.calls)


class Believed(Normed):
    element_wise = True


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "of no known name": (lambda m: Counting(m.parameters()), "optimizer Counting gives parameters other values"),
    "by name": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS works on all parameters"),
    "by mode": (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "capturable=True"),
}


def refuse_all(plan: Plan) -> dict[str, str]:
    messages = {}
    with one_mesh(plan) as mesh:
        for name, (make, _) in REFUSED.items():
            model = net()
            optimizer, expected = make(model), net().state_dict()
            with pytest.raises(ValueError) as error:
                build(model, optimizer, plan, mesh)
            messages[name] = str(error.value)
            found = model.state_dict()
            assert all(torch.equal(found[key], value) for key, value in expected.items())
            assert not model._forward_hooks and not model._forward_pre_hooks
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
            # The same model goes on with another one.
            session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, mesh)
            session.backward(session.module(torch.ones(2, 4)).square().mean())
            session.optimizer.step()
            session.close()
    return messages


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_half_done(stage: int) -> None:
    first, second = run_ranks(2, refuse_all, zero(stage))  # type: ignore[arg-type]
    assert first == second and first.keys() == REFUSED.keys()
    for name, (_, words) in REFUSED.items():
        assert words in first[name], first[name]


def believed(plan: Plan) -> bool:
    model = net()
    with one_mesh(plan) as mesh:
        session = build(model, Believed(model.parameters()), plan, mesh)
        session.backward(session.module(torch.ones(2, 4)).square().mean())
        session.optimizer.step()
        state = session.module.state_dict()
        session.close()
    return not all(torch.equal(state[key], value) for key, value in net().state_dict().items())


def test_one_that_says_it_is_element_wise_is_taken() -> None:
    assert run_ranks(2, believed, zero(2)) == [True, True]
