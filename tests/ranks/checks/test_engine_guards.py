"""What would silently train or save something else is an error, and what may be done keeps values exactly."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.comm import PeerError
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, adam, data, loss_of, one_mesh, seeded, sgd, sharded, told
from tests.support.sets import full

STAGES = ["zero3", *full("zero2", "zero3_gloo")]
RESIDENT_TOO = ["zero2", "zero3", *full("zero3_gloo")]
"""Where parameters that stay gathered go another way."""
State = dict[str, Tensor]


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
    return told(lambda: session.optimizer.step())


def replace_a_parameter(session: Session) -> str:
    layer = session.module.unwrap()[2]
    layer.weight = nn.Parameter(torch.ones_like(layer.weight))
    return told(lambda: session.optimizer.step())


def step_the_original(session: Session) -> str:
    session.backward(loss_of(session))
    return told(lambda: session.optimizer.optimizer.step())


def step_inside_gathered(session: Session) -> str:
    with session.module.gathered():
        session.backward(loss_of(session))
        return told(lambda: session.optimizer.step())


def copy_the_module(session: Session) -> str:
    return told(lambda: copy.deepcopy(session.module.unwrap()), TypeError)


def changing_groups(session: Session) -> str:
    model = seeded(net)
    with sharded(model, Counting(model.parameters()), session.plan, session.mesh) as other:
        other.backward(loss_of(other))
        return told(lambda: other.optimizer.step())


def shard_twice(session: Session) -> str:
    model = session.module.unwrap()
    return told(lambda: build(model, sgd(model), session.plan, session.mesh), ValueError)


def complex_parameter(session: Session) -> str:
    model = nn.Module()
    model.phase = nn.Parameter(torch.ones(6, dtype=torch.complex128))
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
    (replace_a_parameter, ("2.weight (6, 6)", "replaced a parameter of", "before sharding")),
    (step_the_original, ("SGD", "session.optimizer (or the optimizer")),
    (step_inside_gathered, ("gathered()", "leave the block")),
    (copy_the_module, ("2 ranks", "state_dict()")),
    (changing_groups, ("Counting.step() changes its param group", "steps")),
    (shard_twice, ("sharded already",)),
    (complex_parameter, ("phase", "complex128")),
]


def mistakes(plan: Plan) -> list[str]:
    messages = []
    with one_mesh(plan) as mesh:
        for mistake, _ in MISTAKES:
            model = seeded(net)
            with sharded(model, sgd(model), plan, mesh) as session:
                messages.append(mistake(session))
    return messages


@pytest.mark.parametrize("name", RESIDENT_TOO)  # at ZeRO-2 autograd tells of an old graph
def test_wrong_uses_are_errors(name: str) -> None:
    for messages in run_ranks(2, mistakes, PLANS[name]):
        for message, (mistake, words) in zip(messages, MISTAKES, strict=True):
            assert all(word in message for word in words), f"{mistake.__name__}: {message}"
        stale = "modified by an inplace operation" if name == "zero2" else "were updated 1 times since the forward pass"
        assert stale in messages[0] and stale in messages[1]


# ---- a rank that does something else


def one_rank_makes_no_pass(plan: Plan) -> str:
    model = seeded(net)
    session = build(model, sgd(model), plan)  # never closed: its ranks are out of step
    with pytest.raises(PeerError) as raised:
        if session.mesh.rank == 0:
            loss_of(session).backward()
        session.optimizer.step()
    return str(raised.value)


def test_rank_without_a_backward_pass_is_an_error_on_both() -> None:
    """Each says what both came for, long before the group would give up waiting."""
    for message in run_ranks(2, one_rank_makes_no_pass, PLANS["zero2"]):
        for rank, purpose in enumerate(("which parameters had gradients", "the gradient norm")):
            assert f"rank {rank}: {purpose} of model 1 of the mesh (" in message, message
        assert "leave out a forward or backward pass" in message


# ---- taking over values


def write_back_nothing(plan: Plan) -> tuple[State, State]:
    model = half_frozen()
    with sharded(model, adam(model), plan) as session:
        session.backward(session.module(data(session.mesh.rank, 0).float()).square().mean())
        session.optimizer.step()  # masters are now not what 16 bits can hold
        before = session.module.state_dict()
        with session.module.gathered(write_back=True):
            pass
        return before, session.module.state_dict()


@pytest.mark.parametrize("name", RESIDENT_TOO)
def test_write_back_without_changes_keeps_masters_bit_for_bit(name: str) -> None:
    plan = PLANS[name].but(precision=zero(2, torch.bfloat16).precision)
    for before, after in run_ranks(2, write_back_nothing, plan):
        assert before["0.weight"].dtype == torch.float32
        assert not torch.equal(before["0.weight"], before["0.weight"].bfloat16().float())
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def write_back_all(plan: Plan) -> tuple[State, Tensor]:
    model = half_frozen()
    with sharded(model, adam(model), plan) as session:
        with session.module.gathered(write_back=True), torch.no_grad():
            for index, param in enumerate(model.parameters()):
                param.fill_(0.125 * (index + 1))
        with torch.no_grad():
            return session.module.state_dict(), session.module(torch.ones(1, 6)).float()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("zero2", torch.float32, id="zero2-fp32"),
        pytest.param("zero3", torch.bfloat16, id="zero3-bf16"),
        *full(
            pytest.param("zero2", torch.bfloat16, id="zero2-bf16"),
            pytest.param("zero3", torch.float32, id="zero3-fp32"),
            pytest.param("zero3_gloo", torch.float32, id="zero3_gloo-fp32"),
            pytest.param("zero3_gloo", torch.bfloat16, id="zero3_gloo-bf16"),
        ),
    ],
)
def test_write_back_takes_changes_over(name: str, dtype: torch.dtype) -> None:
    plan = PLANS[name].but(precision=zero(2, torch.bfloat16).precision) if dtype == torch.bfloat16 else PLANS[name]
    model = half_frozen()
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.fill_(0.125 * (index + 1))
        expected = copy.deepcopy(model).to(dtype)(torch.ones(1, 6, dtype=dtype)).float()
    for state, out in run_ranks(2, write_back_all, plan):
        values = {key: value.float() for key, value in state.items()}
        assert_close(values, model.state_dict(), 0.0, name)
        assert torch.equal(out, expected)


# ---- large gradients


def large_gradients(plan: Plan) -> tuple[float, float]:
    torch.manual_seed(0)
    model = net()
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), plan) as session:
        before = session.module.state_dict()
        session.backward(session.module(data(0, 0).float()).sum() * 1e20)
        session.optimizer.step()
        after = session.module.state_dict()
        change = torch.cat([(after[key].double() - before[key].double()).flatten() for key in before]).norm()
        return session.optimizer.get_grad_norm(), float(change)


@pytest.mark.parametrize("name", STAGES)
def test_norm_and_clipping_where_squares_overflow(name: str) -> None:
    torch.manual_seed(0)
    model = net().double()
    (model(data(0, 0)).sum() * 1e20).backward()
    expected = float(torch.cat([param.grad.flatten() for param in model.parameters()]).norm())
    for norm, change in run_ranks(2, large_gradients, PLANS[name].but(max_norm=1.0)):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert change == pytest.approx(1.0, rel=1e-5)
