"""What ``unshard()`` has given back stays as it is, whatever is asked of the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.core.mesh import Mesh
from shardwise.plan import zero
from shardwise.session import OneParameter, Session, ShardedOptimizer, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS
from tests.support.sets import full


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def enter(session: Session, write_back: bool) -> None:
    with session.module.gathered(write_back=write_back):
        pass


def optimizer_of(session: Session) -> ShardedOptimizer:
    return session.optimizers[0]


def one(session: Session) -> OneParameter:
    found = session.one(session.params[0])
    assert found is not None
    return found


def loss(session: Session) -> torch.Tensor:
    """Of the model that was given back."""
    return session.model(torch.ones(2, 4)).sum()  # type: ignore[no-any-return]


def around(session: Session) -> None:
    with session.backward_pass():
        loss(session).backward()  # type: ignore[no-untyped-call]


Use = Callable[[Session, Path], object]
USES: dict[str, Use] = {
    "state_dict": lambda session, _: session.module.state_dict(),
    "load_state_dict": lambda session, _: session.module.load_state_dict(net().state_dict()),
    "gathered": lambda session, _: enter(session, write_back=False),
    "written back": lambda session, _: enter(session, write_back=True),
    "save": lambda session, folder: session.checkpoints.save(folder / "new"),
    "load": lambda session, folder: session.checkpoints.load(folder / "saved"),
    "step": lambda session, _: optimizer_of(session).step(),
    "backward": lambda session, _: session.backward(loss(session)),
    "backward of the optimizer": lambda session, _: optimizer_of(session).backward(loss(session)),
    "backward_by_grad": lambda session, _: optimizer_of(session).backward_by_grad(loss(session), torch.ones(())),
    "backward_pass": lambda session, _: around(session),
    "expect_backward": lambda session, _: session.expect_backward(2.0),
    "load_state_dict of the optimizer": lambda session, _: optimizer_of(session).load_state_dict({}),
    "write_back": lambda session, _: session.write_back(),
    "offload_states": lambda session, _: session.offload_states(),
    "full_gradients": lambda session, _: session.full_gradients(),
    "clip_grad_by_norm": lambda session, _: optimizer_of(session).clip_grad_by_norm(1.0),
    "clip_grad_by_value": lambda session, _: optimizer_of(session).clip_grad_by_value(1.0),
    "unscale": lambda session, _: optimizer_of(session).unscale(2.0),
    "value": lambda session, _: one(session).value(),
    "set_value": lambda session, _: one(session).set_value(torch.ones(4, 4)),
    "set_gradient": lambda session, _: one(session).set_gradient(torch.ones(4, 4)),
    "set_state": lambda session, _: one(session).set_state("momentum_buffer", torch.ones(4, 4)),
}
EACH = {"zero2": PLANS["zero2"], "zero3": PLANS["zero3"], "kept": zero(3).but(gathered_budget_bytes=10**8)}


def state_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Values, and gradients."""
    grads = {f"{name}.grad": param.grad for name, param in model.named_parameters()}
    return {**{key: value.clone() for key, value in model.state_dict().items()}, **grads}


def same(found: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    return found is before if found is None or before is None else torch.equal(found, before)


def evaluate(session: Session) -> int:
    """How many units stay gathered."""
    with torch.no_grad():
        session.module(torch.ones(2, 4))
    return len(session.engine.pool._gathered)


def uses(name: str, folder: Path) -> dict[str, tuple[str, bool]]:
    found = {}
    mesh = Mesh.create(EACH[name].mesh, torch.device("cpu"), EACH[name].comm)
    for use, call in USES.items():
        model = net()
        session = build(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), EACH[name], mesh)
        if use == "load":
            session.checkpoints.save(folder / "saved")
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizers[0].step()
        assert bool(evaluate(session)) == (name != "zero2")
        session.unshard()
        assert not session.engine.pool._gathered
        before = state_of(model)
        try:
            call(session, folder)
            message = ""
        except Exception as error:
            message = str(error)
        session.unshard()  # does nothing
        session.drop_gathered()
        session.close()
        found[use] = message, all(same(value, before[key]) for key, value in state_of(model).items())
    mesh.close()
    return found


@pytest.mark.parametrize("name", ["zero3", *full("zero2", "kept")])
def test_what_unshard_gave_back_is_not_taken_again(name: str, tmp_path: Path) -> None:
    """At ZeRO-3 the weights became NaN, after an error that said they had been moved, or after none; or nothing
    happened."""
    for found in run_ranks(2, uses, name, tmp_path):
        for use, (message, same) in found.items():
            assert "Sequential is no longer sharded since unshard()" in message, (use, message)
            assert same, f"{use} changed the model"


def old_optimizer(name: str) -> tuple[str, str]:
    messages = []
    for end in (Session.close, Session.unshard):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = build(model, optimizer, PLANS[name])
        end(session)
        try:
            optimizer.step()
            messages.append("stepped")
        except RuntimeError as error:
            messages.append(str(error))
        session.mesh.close()
    return messages[0], messages[1]


def test_the_old_optimizer_says_that_it_has_parts_alone() -> None:
    """It would update pieces that are of no model, and nothing would be trained. After close() alone the parameters
    have no values at ZeRO-3, and a new optimizer is of no use."""
    for closed, unsharded in run_ranks(2, old_optimizer, "zero3"):
        assert "SGD" in closed and "model that was closed: build it again, with a new one" in closed
        assert "SGD" in unsharded and "make a new one on model.parameters()" in unsharded
    for messages in run_ranks(2, old_optimizer, "zero2"):
        assert all("make a new one on model.parameters()" in text for text in messages), messages
