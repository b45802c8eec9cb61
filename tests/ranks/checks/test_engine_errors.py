"""What cannot work is refused, with the value and the way out in the message, on every rank alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from engine_setup import PLANS, sharded
from torch import nn

from shardwise.plan import ByModule, MeshPlan, Plan, zero
from shardwise.session import build
from shardwise.testing import run_ranks

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


def refusals() -> list[tuple[str, str]]:
    found = []
    for make, plan, _, _ in REFUSED:
        model = net()
        try:
            build(model, make(model), plan)
            found.append(("", "accepted"))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_build_refuses() -> None:
    for found in run_ranks(2, refusals):
        for (kind, message), (_, _, expected, words) in zip(found, REFUSED, strict=True):
            assert kind == expected.__name__ and all(word in message for word in words), message


def later(name: str) -> list[str]:
    """Mistakes after build."""
    model = net()
    model[0].requires_grad_(False)
    messages = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sharded(model, optimizer, PLANS[name]) as session:
        assert session.optimizer is not None

        def unfreeze() -> None:
            model[0].bias.requires_grad_(True)
            session.optimizer.step()

        def nested() -> None:
            with session.no_sync():
                pass

        def pickled() -> None:
            session.optimizer.__getstate__()

        def assign() -> None:
            session.module.load_state_dict({}, assign=True)

        mistakes = [lambda: session.optimizer.add_param_group({"params": []}), unfreeze, nested, pickled, assign]
        for mistake in mistakes:
            try:
                mistake()
                messages.append("")
            except (RuntimeError, ValueError, TypeError) as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_mistakes_after_build(name: str) -> None:
    for group, unfreeze, no_sync, pickled, assign in run_ranks(2, later, name):
        assert "add_param_group(['params'])" in group and "before" in group
        assert "0.bias has requires_grad=True" in unfreeze and "before" in unfreeze
        assert no_sync == "" if name in ("ddp", "zero1") else "reduce='every'" in no_sync
        assert "2 ranks" in pickled and "state_dict()" in pickled
        assert "assign=True" in assign


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
