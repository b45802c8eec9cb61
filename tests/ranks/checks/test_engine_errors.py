"""What cannot work is refused, with the value and the way out in the message, on every rank alike.

An optimizer that cannot be sharded is refused on every rank, and the model and the optimizer are as before.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.plan import ByModule, MeshPlan, Plan, zero
from shardwise.session import build
from shardwise.testing import assert_close
from tests.support.engine_setup import PLANS, one_mesh, sharded, told
from tests.support.on_ranks import everywhere, on_ranks

Make = Callable[[nn.Module], object]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def twice(model: nn.Module) -> object:
    return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.1)]


REFUSED: list[tuple[Make, Plan, tuple[str, ...]]] = [
    (twice, zero(2), ("1.weight", "two optimizers")),
    (lambda m: torch.optim.Adam(m.parameters(), differentiable=True), zero(3), ("differentiable=True",)),
    (lambda m: None, zero(1, dp_replicate=3), ("there are 2", "dp_replicate=3")),
    (lambda m: None, zero(1).but(mesh=MeshPlan(dp_shard=4, dp_replicate=-1)), ("are 2", "dp_shard=4")),
    (lambda m: None, zero(3).but(packing=ByModule(unit_classes=("Conv9d",))), ("Conv9d", "Linear")),
]


@on_ranks(2)
def test_build_refuses() -> None:
    for make, plan, words in REFUSED:
        model = net()
        message = told(lambda model=model, make=make, plan=plan: build(model, make(model), plan), ValueError)  # type: ignore[misc]
        assert all(word in message for word in words), message


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_mistakes_after_build(name: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), PLANS[name]) as session:
        own = session.optimizers[0]

        def unfreeze() -> None:
            model[0].bias.requires_grad_(True)
            own.step()

        mistakes: list[tuple[Callable[[], object], tuple[str, ...]]] = [
            (lambda: own.add_param_group({"params": []}), ("add_param_group(['params'])", "before")),
            (unfreeze, ("0.bias has requires_grad=True", "before")),
            (own.__getstate__, ("2 ranks", "state_dict()")),
            (lambda: session.module.load_state_dict({}, assign=True), ("assign=True",)),
            *([(session.no_sync, ("reduce='every'",))] if name in ("zero2", "zero3") else []),
        ]
        for mistake, words in mistakes:
            message = told(mistake, (RuntimeError, ValueError, TypeError))
            assert all(word in message for word in words), message
        if name in ("ddp", "zero1"):
            with session.no_sync():
                pass


@on_ranks(2)
def test_close_gives_the_module_back() -> None:
    model = net()
    x = torch.ones(2, 4)
    expected = model(x)
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), PLANS["zero2"])
    assert torch.equal(session.module(x), expected)
    session.close()
    assert not model._forward_hooks and not model._forward_pre_hooks
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(model(x), expected)
    session.mesh.close()


class Counting(torch.optim.SGD):
    """Of no known name: its steps become smaller with each call."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / self.calls)


class Believed(torch.optim.SGD):
    """Moves each parameter by the direction of its gradient, and says that this goes by elements."""

    element_wise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad / param.grad.norm())


REFUSED_OPTIMIZERS: list[tuple[Make, str]] = [
    (lambda m: Counting(m.parameters(), lr=0.1), "optimizer Counting gives parameters other values"),
    (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS works on all parameters"),
    (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "capturable=True"),
]


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_half_done(stage: int) -> None:
    plan = zero(stage)  # type: ignore[arg-type]
    with one_mesh(plan) as mesh:
        for make, words in REFUSED_OPTIMIZERS:
            model = net()
            optimizer, expected = make(model), copy.deepcopy(model.state_dict())
            message = told(lambda model=model, optimizer=optimizer: build(model, optimizer, plan, mesh), ValueError)
            assert words in message and everywhere(message) == [message] * 2
            assert_close(model.state_dict(), expected, 0.0, words)
            assert not model._forward_hooks and not model._forward_pre_hooks
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
            # The same model goes on with another one, which says of itself that it is element-wise.
            with sharded(model, Believed(model.parameters(), lr=0.1), plan, mesh) as session:
                session.backward(session.module(torch.ones(2, 4)).square().mean())
                session.optimizer.step()
                assert not torch.equal(session.module.state_dict()["0.weight"], expected["0.weight"])
