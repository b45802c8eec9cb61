"""What would silently train or save something else is an error, and what may be done keeps values exactly."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.comm import PeerError
from shardwise.plan import zero
from shardwise.session import Session, build
from shardwise.testing import assert_close
from tests.support.engine_setup import PLANS, adam, data, loss_of, one_mesh, seeded, sgd, sharded, told
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

STAGES = ["zero3", *full("zero2", "zero3_gloo")]
RESIDENT_TOO = ["zero2", "zero3", *full("zero3_gloo")]
"""Where parameters that stay gathered go another way."""


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


def half_frozen() -> nn.Module:
    model = net()
    model[1].requires_grad_(False)
    model[3].requires_grad_(False)
    return model


# ---- wrong uses


class Counting(torch.optim.Optimizer):
    """Keeps the number of its steps in the param group, as Prodigy and D-Adaptation do with their estimates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
            group["steps"] += 1


def stale_graph(session: Session) -> str:
    first, second = loss_of(session, 0), loss_of(session, 1)
    session.backward(first)
    session.optimizer.step()
    return told(lambda: session.backward(second))


def load_inside_gathered(session: Session) -> str:
    with session.module.gathered():
        return told(lambda: session.module.unwrap().load_state_dict(seeded(net, 1).state_dict()))


def cast_the_module(session: Session) -> str:
    session.module.unwrap().float()
    return told(session.optimizer.step)


def step_the_original(session: Session) -> str:
    session.backward(loss_of(session))
    return told(session.optimizer.optimizer.step)


def step_inside_gathered(session: Session) -> str:
    with session.module.gathered():
        session.backward(loss_of(session))
        return told(session.optimizer.step)


def copy_the_module(session: Session) -> str:
    return told(lambda: copy.deepcopy(session.module.unwrap()), TypeError)


def changing_groups(session: Session) -> str:
    model = seeded(net)
    with sharded(model, Counting(model.parameters()), session.plan, session.mesh) as other:
        other.backward(loss_of(other))
        return told(other.optimizer.step)


def shard_twice(session: Session) -> str:
    model = session.module.unwrap()
    return told(lambda: build(model, sgd(model), session.plan, session.mesh), ValueError)


def graph_from_before_a_write(session: Session) -> str:
    loss = loss_of(session)
    with session.module.gathered(write_back=True), torch.no_grad():
        for param in session.model.parameters():
            param.add_(1.0)
    message = told(lambda: session.backward(loss))
    session.module.zero_grad()
    session.backward(loss_of(session))
    session.optimizer.step()
    return message


MISTAKES: list[tuple[Callable[[Session], str], tuple[str, ...]]] = [
    (stale_graph, ()),  # one message by autograd, one by us
    (graph_from_before_a_write, ()),
    (load_inside_gathered, ("Sequential", "bypass", "session.module (or", "gathered(write_back=True)")),
    (cast_the_module, ("0.weight", "float32", "before sharding")),
    (step_the_original, ("SGD", "session.optimizer (or the optimizer")),
    (step_inside_gathered, ("gathered()", "leave the block")),
    (copy_the_module, ("2 ranks", "state_dict()")),
    (changing_groups, ("Counting.step() changes its param group", "steps")),
    (shard_twice, ("sharded already",)),
]


@on_ranks(2)
@pytest.mark.parametrize("name", RESIDENT_TOO)  # at ZeRO-2 autograd tells of an old graph
def test_wrong_uses_are_errors(name: str) -> None:
    stale = "modified by an inplace operation" if name == "zero2" else "were updated 1 times since the forward pass"
    with one_mesh(PLANS[name]) as mesh:
        for mistake, words in MISTAKES:
            model = seeded(net)
            with sharded(model, sgd(model), PLANS[name], mesh) as session:
                message = mistake(session)
            assert all(word in message for word in words or (stale,)), f"{mistake.__name__}: {message}"


# ---- a rank that does something else


@on_ranks(2)
def test_rank_without_a_backward_pass_is_an_error_on_both() -> None:
    """Each says what both came for, long before the group would give up waiting."""
    model = seeded(net)
    session = build(model, sgd(model), PLANS["zero2"])  # never closed: its ranks are out of step
    with pytest.raises(PeerError) as error:
        if session.mesh.rank == 0:
            loss_of(session).backward()
        session.optimizer.step()
    message = str(error.value)
    for rank, purpose in enumerate(("which parameters had gradients", "the gradient norm")):
        assert f"rank {rank}: {purpose} of model 1 of the mesh (" in message, message
    assert "leave out a forward or backward pass" in message


# ---- taking over values


@on_ranks(2)
@pytest.mark.parametrize("name", RESIDENT_TOO)
def test_write_back_without_changes_keeps_masters_bit_for_bit(name: str) -> None:
    model = half_frozen()
    with sharded(model, adam(model), PLANS[name].but(precision=zero(2, torch.bfloat16).precision)) as session:
        session.backward(session.module(data(session.mesh.rank, 0).float()).square().mean())
        session.optimizer.step()  # masters are now not what 16 bits can hold
        before = session.module.state_dict()
        with session.module.gathered(write_back=True):
            pass
        weight = before["0.weight"]
        assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
        assert_close(session.module.state_dict(), before, 0.0, name)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    for index, param in enumerate(model.parameters()):
        param.fill_(0.125 * (index + 1))


WRITTEN = [("zero2", torch.float32), ("zero3", torch.bfloat16)]
WRITTEN += full(("zero2", torch.bfloat16), ("zero3", torch.float32))
WRITTEN += full(("zero3_gloo", torch.float32), ("zero3_gloo", torch.bfloat16))


@on_ranks(2)
@pytest.mark.parametrize(("name", "dtype"), WRITTEN)
def test_write_back_takes_changes_over(name: str, dtype: torch.dtype) -> None:
    plan = PLANS[name].but(precision=zero(2, torch.bfloat16).precision) if dtype == torch.bfloat16 else PLANS[name]
    plain, model = half_frozen(), half_frozen()
    fill(plain)
    with sharded(model, adam(model), plan) as session:
        with session.module.gathered(write_back=True):
            fill(model)
        assert_close(session.module.state_dict(), plain.state_dict(), 0.0, name, check_dtype=False)
        with torch.no_grad():
            out = session.module(torch.ones(1, 6)).float()
    assert torch.equal(out, plain.to(dtype)(torch.ones(1, 6, dtype=dtype)).float())


# ---- large gradients


@on_ranks(2)
@pytest.mark.parametrize("name", STAGES)
def test_norm_and_clipping_where_squares_overflow(name: str) -> None:
    torch.manual_seed(0)
    model = net()
    plain = copy.deepcopy(model).double()
    (plain(data(0, 0)).sum() * 1e20).backward()
    expected = float(torch.cat([param.grad.flatten() for param in plain.parameters()]).norm())
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), PLANS[name].but(max_norm=1.0)) as session:
        before = session.module.state_dict()
        session.backward(session.module(data(0, 0).float()).sum() * 1e20)
        session.optimizer.step()
        after = session.module.state_dict()
        change = torch.cat([(after[key].double() - before[key].double()).flatten() for key in before]).norm()
        assert session.optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-5)
        assert float(change) == pytest.approx(1.0, rel=1e-5)
