"""What cannot work is refused, with the value and the way out in the message, on every rank alike.

An optimizer that cannot be sharded is refused on every rank, and the model and the optimizer are as before.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.plan import ByModule, MeshPlan, Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, one_mesh, sharded, told
from tests.support.on_ranks import on_ranks

Make = Callable[[nn.Module], object]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def foreign(model: nn.Module) -> object:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 5))], lr=0.1)


def twice(model: nn.Module) -> object:
    return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.1)]


REFUSED: list[tuple[Make, Plan, type[Exception], tuple[str, ...]]] = [
    (foreign, zero(2), ValueError, ("(3, 5)", "model.parameters()")),
    (twice, zero(2), ValueError, ("1.weight", "two optimizers")),
    (lambda m: torch.optim.LBFGS(m.parameters()), zero(1), ValueError, ("LBFGS", "AdamW")),
    (lambda m: torch.optim.Adam(m.parameters(), differentiable=True), zero(3), ValueError, ("differentiable=True",)),
    (lambda m: None, zero(1, dp_replicate=3), ValueError, ("there are 2", "dp_replicate=3")),
    (lambda m: None, zero(1).but(mesh=MeshPlan(dp_shard=4, dp_replicate=-1)), ValueError, ("are 2", "dp_shard=4")),
    (lambda m: None, zero(3).but(packing=ByModule(unit_classes=("Conv9d",))), ValueError, ("Conv9d", "Linear")),
]


@on_ranks(2)
def test_build_refuses() -> None:
    for make, plan, kind, words in REFUSED:
        model = net()
        message = told(lambda model=model, make=make, plan=plan: build(model, make(model), plan), kind)  # type: ignore[misc]
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


def test_close_gives_the_module_back() -> None:
    results = run_ranks(2, closed, "zero2")
    assert list(itertools.chain(*results)) == [True] * 8


def closed(name: str) -> list[bool]:
    model = net()
    x = torch.ones(2, 4)
    expected = model(x).detach()
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), PLANS[name])
    inside = session.module(x).detach()
    session.close()
    hooks = not model._forward_hooks and not model._forward_pre_hooks
    model(x).sum().backward()
    local = all(p.grad is not None for p in model.parameters())
    result = [torch.equal(inside, expected), hooks, local, torch.equal(model(x).detach(), expected)]
    session.mesh.close()
    return result


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


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


REFUSED_OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "of no known name": (lambda m: Counting(m.parameters()), "optimizer Counting gives parameters other values"),
    "by name": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS works on all parameters"),
    "by mode": (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "capturable=True"),
}


def refuse_all(plan: Plan) -> dict[str, str]:
    messages = {}
    with one_mesh(plan) as mesh:
        for name, (make, _) in REFUSED_OPTIMIZERS.items():
            model = small_net()
            optimizer, expected = make(model), small_net().state_dict()
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
    assert first == second and first.keys() == REFUSED_OPTIMIZERS.keys()
    for name, (_, words) in REFUSED_OPTIMIZERS.items():
        assert words in first[name], first[name]


def believed(plan: Plan) -> bool:
    model = small_net()
    with one_mesh(plan) as mesh:
        session = build(model, Believed(model.parameters()), plan, mesh)
        session.backward(session.module(torch.ones(2, 4)).square().mean())
        session.optimizer.step()
        state = session.module.state_dict()
        session.close()
    return not all(torch.equal(state[key], value) for key, value in small_net().state_dict().items())


def test_one_that_says_it_is_element_wise_is_taken() -> None:
    assert run_ranks(2, believed, zero(2)) == [True, True]
