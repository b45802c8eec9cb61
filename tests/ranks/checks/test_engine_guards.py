"""What would silently train or save something else is an error, and what may be done keeps values exactly."""

from __future__ import annotations

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
from tests.support.engine_setup import PLANS, adam, check, data, loss_of, one_mesh, seeded, sgd, sharded, told
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


# ---- writing to gathered parameters


class Watched(nn.Module):
    """Lets ``act`` have its weight in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.act: Callable[[nn.Parameter], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.act is not None:
            self.act(self.inner.weight)
        return self.inner(x)


def kept_views(plan: Plan) -> tuple[list[State], State, State]:
    """States after two steps: undisturbed, written to through a view after its step, with shared storages; and what a
    view taken inside gathered() says before and after an update."""
    states: list[State] = []
    views: list[Tensor] = []
    with one_mesh(plan) as mesh:
        for act in (None, lambda weight: views.append(weight.data), lambda weight: weight.share_memory_()):
            model = seeded(lambda: nn.Sequential(Watched(), nn.Linear(6, 6)))
            with sharded(model, sgd(model), plan, mesh) as session:
                for index in range(2):
                    model[0].act = act
                    session.backward(loss_of(session, index))
                    model[0].act = None
                    session.optimizer.step()
                    for view in views:
                        view.fill_(7.0 + mesh.rank)
                states.append(session.module.state_dict())
        model = seeded(net)
        with sharded(model, sgd(model), plan, mesh) as session:
            with session.module.gathered():
                inside = {name: value.data for name, value in model.named_parameters()}
                inside["0.weight"].add_(1.0)
                then = {name: value.clone() for name, value in inside.items()}
            session.backward(loss_of(session))
            session.optimizer.step()
    return states, inside, then


@pytest.mark.parametrize("name", ["zero3", *full("zero3_gloo")])
def test_views_that_outlive_a_gather_do_no_harm(name: str) -> None:
    for (plain, written, shared), inside, then in run_ranks(2, kept_views, PLANS[name]):
        assert_close(written, plain, rtol=0.0, what="state after writes to views that were kept")
        assert_close(shared, plain, rtol=0.0, what="state with storages in shared memory")
        assert_close(inside, then, rtol=0.0, what="views of gathered()")


def different_writes(plan: Plan) -> list[float]:
    model = seeded(net)
    with sharded(model, sgd(model), plan.but(gathered_budget_bytes=1 << 30)) as session:
        with session.module.gathered(write_back=True):
            for param in model.parameters():
                param.data.fill_(1.0 + session.mesh.rank)
        return [float(session.module(torch.ones(1, 6, dtype=torch.float64)).sum())]


@pytest.mark.parametrize("name", ["zero3", "zero3_gloo"])
def test_ranks_that_wrote_back_different_values_compute_with_the_same(name: str) -> None:
    first, second = run_ranks(2, different_writes, PLANS[name])
    assert first == second


def lost(plan: Plan) -> str:
    """Rank 1 fails in its update, alone, and goes on as if nothing had happened."""
    model = seeded(net)
    optimizer = sgd(model)
    with one_mesh(plan) as mesh, sharded(model, optimizer, plan, mesh) as session:
        session.backward(loss_of(session))
        if mesh.rank == 1:
            session.optimizer.updates.run = _fails
        with pytest.raises((ArithmeticError, PeerError)) as first:
            session.optimizer.step()
        if mesh.rank == 0:
            return str(first.value)
        with pytest.raises(PeerError) as second:
            session.optimizer.step()
        return str(second.value)


def _fails(*_: object) -> None:
    raise ArithmeticError("this update fails")


def test_ranks_that_lost_each_other_in_an_update_are_told() -> None:
    first, second = run_ranks(2, lost, PLANS["zero3"], timeout=60)
    assert "rank 0 is at fence after an update and rank 1 at exchange" in first
    assert "rank 0 at fence after an update" in second


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


def cast_the_session(session: Session) -> str:
    return told(lambda: session.module.float())


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


def copy_the_session_module(session: Session) -> str:
    return told(lambda: copy.deepcopy(session.module), TypeError)


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
    (
        load_inside_gathered,
        ("Sequential", "bypass", "session.module (or", "gathered(write_back=True)"),
    ),
    (cast_the_session, ("float64", "float32", "before boost/build")),
    (cast_the_module, ("0.weight", "float32", "before boost/build")),
    (replace_a_parameter, ("2.weight (6, 6)", "replaced a parameter of", "before boost/build")),
    (step_the_original, ("SGD", "session.optimizer (or the optimizer")),
    (step_inside_gathered, ("gathered()", "leave the block")),
    (copy_the_module, ("2 ranks", "state_dict()")),
    (copy_the_session_module, ("2 ranks", "state_dict()")),
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


def save_the_module(plan: Plan) -> tuple[str, State]:
    model = seeded(net)
    with sharded(model, sgd(model), plan) as session:
        message = told(model.state_dict)
        with session.module.gathered():
            inside = {name: value.clone() for name, value in model.state_dict().items()}
    return message, inside


@pytest.mark.parametrize("name", ["zero3", "zero3_gloo"])
def test_saving_the_module_itself_needs_gathered_parameters(name: str) -> None:
    results = run_ranks(2, save_the_module, PLANS[name])
    assert all("gathered() block" in message for message, _ in results)
    check([inside for _, inside in results], seeded(net).state_dict(), name, rtol=0.0)


def save_a_resident_module(plan: Plan) -> tuple[State, State]:
    model = seeded(net)
    with sharded(model, sgd(model), plan) as session:
        session.backward(loss_of(session))
        session.optimizer.step()
        own = {name: value.clone() for name, value in model.state_dict().items()}
        return own, session.module.state_dict()


def test_saving_the_module_itself_at_zero2_is_up_to_date() -> None:
    """Parameters stay gathered there; a renewal that still is to come must not be missed."""
    for own, whole in run_ranks(2, save_a_resident_module, PLANS["zero2"]):
        assert_close(own, whole, 0.0, "state_dict() of the module itself")


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


def load_over_gathered(plan: Plan) -> Tensor:
    model = seeded(half_frozen)
    with sharded(model, adam(model), plan) as session, torch.no_grad():
        session.module(data(0, 0))
        session.module.load_state_dict(seeded(half_frozen, 5).state_dict())
        return session.module(data(0, 0))


@pytest.mark.parametrize("name", ["zero3", *full("zero2", "zero3_gloo", "half")])
def test_load_state_dict_renews_gathered_frozen_parameters(name: str) -> None:
    expected = seeded(half_frozen, 5)(data(0, 0)).detach()
    for out in run_ranks(2, load_over_gathered, PLANS[name]):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=0.0)


def renamed() -> nn.Module:
    model = net()

    def rename(_module: nn.Module, state: State, prefix: str, _meta: object) -> State:
        return {prefix + "renamed." + key.removeprefix(prefix): state[key] for key in state}

    model._register_state_dict_hook(rename)
    return model


def saved(plan: Plan) -> State:
    model = seeded(renamed)
    with sharded(model, adam(model), plan) as session:
        return session.module.state_dict()


@pytest.mark.parametrize("name", STAGES)
def test_state_dict_hooks_that_rename(name: str) -> None:
    expected = seeded(renamed).state_dict()
    assert all(key.startswith("renamed.") for key in expected)
    results = run_ranks(2, saved, PLANS[name])
    assert all(list(state) == list(expected) for state in results)
    check(results, expected, name, rtol=0.0)


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
