"""What cannot work is refused, with the value and the way out in the message, on every rank alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise.plan import ByModule, MeshPlan, Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, sharded, told

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
    (lambda m: None, zero(1, dp_replicate=3), ValueError, ("2 ranks", "dp_replicate=3")),
    (lambda m: None, zero(1).but(mesh=MeshPlan(dp_shard=4, dp_replicate=-1)), ValueError, ("2 ranks", "dp_shard=4")),
    (lambda m: None, zero(3).but(packing=ByModule(unit_classes=("Conv9d",))), ValueError, ("Conv9d", "Linear")),
]


def refusals() -> None:
    for make, plan, kind, words in REFUSED:
        model = net()
        message = told(lambda model=model, make=make, plan=plan: build(model, make(model), plan), kind)  # type: ignore[misc]
        assert all(word in message for word in words), message


def test_build_refuses() -> None:
    run_ranks(2, refusals)


def later(name: str) -> None:
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


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_mistakes_after_build(name: str) -> None:
    run_ranks(2, later, name)


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
