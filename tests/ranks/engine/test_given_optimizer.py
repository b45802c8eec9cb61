"""What programs do by way of the optimizer that they gave to a build, or of its groups, against plain PyTorch."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, check, data, one_mesh, seeded, sharded, told
from tests.support.sets import full

STEPS = 3
ROWS = {name: PLANS[name] for name in ("ddp", "zero1", "zero2", "zero3", "zero3_straddling")}
Reads = list[float]
Habit = Callable[[Any, int], Reads]
"""Called between backward and step with an optimizer and the number of the step."""


class Net(nn.Module):
    """With a frozen layer in the middle, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(torch.tanh(self.first(x)))) * self.scalar


def adam(model: Any) -> torch.optim.Optimizer:
    """Two groups, with what is frozen among them, as programs have it that give all parameters."""
    own = [{"params": [*model.first.parameters(), *model.frozen.parameters()]}]
    own += [{"params": [*model.last.parameters(), model.scalar], "lr": 0.02}]
    return torch.optim.Adam(own, lr=0.05, eps=1e-3)


def params_of(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def grads_of(optimizer: Any) -> list[Tensor]:
    return [p.grad for p in params_of(optimizer) if p.grad is not None]


# ---- by way of the groups


def clip_all(optimizer: Any, _step: int) -> Reads:
    return [float(clip_grad_norm_(params_of(optimizer), 0.01))]


def clip_one_group(optimizer: Any, _step: int) -> Reads:
    return [float(clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01, math.inf, foreach=False))]


def clip_values(optimizer: Any, _step: int) -> Reads:
    clip_grad_value_(params_of(optimizer), 0.01)
    return [float(len(grads_of(optimizer)))]


def own_norm(optimizer: Any, _step: int) -> Reads:
    return [sum(float(grad.norm()) ** 2 for grad in grads_of(optimizer)) ** 0.5]


def scale(optimizer: Any, step: int) -> Reads:
    for grad in grads_of(optimizer):
        grad.mul_(0.5 + step)
    return []


def centre(optimizer: Any, _step: int) -> Reads:
    for param in params_of(optimizer):
        if param.grad is not None:
            param.grad = param.grad - param.grad.mean()
    return []


def drop_a_group(optimizer: Any, step: int) -> Reads:
    for param in optimizer.param_groups[step % 2]["params"]:
        param.grad = None
    return [float(len(grads_of(optimizer)))]


HABITS: list[Habit] = [clip_all, clip_one_group, clip_values, own_norm, scale, centre, drop_a_group]


def zero_by_hand(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def plain(ranks: int, habit: Habit, hooked: bool = False) -> tuple[Reads, dict[str, Tensor]]:
    model = seeded(Net)
    optimizer, reads = adam(model), Reads()
    if hooked:
        optimizer.register_step_pre_hook(hook(habit, reads))
    for step in range(STEPS):
        for rank in range(ranks):
            (model(data(rank, step)).square().mean() / ranks).backward()
        if not hooked:
            reads += habit(optimizer, step)
        optimizer.step()
        zero_by_hand(optimizer)
    return reads, dict(model.state_dict())


def hook(habit: Habit, reads: Reads) -> Any:
    steps = iter(range(STEPS))
    return lambda optimizer, *_: reads.extend(habit(optimizer, next(steps)))


def trained(plan: Plan, mesh: Mesh, habit: Habit, hooked: bool = False, given: bool = False) -> Any:
    """``given``: by way of the user's own object."""
    model = seeded(Net)
    optimizer, reads = adam(model), Reads()
    if hooked:
        optimizer.register_step_pre_hook(hook(habit, reads))
    with sharded(model, optimizer, plan, mesh) as session:
        mine: Any = optimizer if given else session.optimizer
        for step in range(STEPS):
            session.backward(session.module(data(mesh.rank, step)).square().mean())
            if not hooked:
                reads += habit(mine, step)
            session.optimizer.step()
            zero_by_hand(mine)
        return reads, session.module.state_dict()


def every_habit(plan: Plan, hooked: bool) -> list[Any]:
    with one_mesh(plan) as mesh:
        return [trained(plan, mesh, habit, hooked, bool(at % 2)) for at, habit in enumerate(HABITS)]


@pytest.mark.parametrize(
    ("name", "hooked"), [("zero2", False), ("zero3", True), *full(("zero1", True), ("zero3_straddling", False))]
)
def test_gradients_are_reached_through_the_groups(name: str, hooked: bool) -> None:
    """Clipping through them returned 0.0 and clipped nothing, and a hook's edits did not count in its step."""
    for ranks in (1, 2):
        every = run_ranks(ranks, every_habit, ROWS[name], hooked)
        for at, habit in enumerate(HABITS):
            reads, expected = plain(ranks, habit, hooked)
            what = f"{habit.__name__}, {name}, {ranks} ranks"
            for found, _ in (own[at] for own in every):
                assert found == pytest.approx(reads, rel=1e-9, nan_ok=False), what
            check([own[at][1] for own in every], expected, what, 1e-10)


# ---- the object that was given


def own_methods(plan: Plan) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Gradients of a pass are dropped by it, its state is taken and given to a second session."""
    messages = []
    with one_mesh(plan) as mesh:
        model = seeded(Net)
        optimizer = adam(model)
        session = build(model, optimizer, plan, mesh)
        for step in range(2):
            session.backward(session.module(data(mesh.rank, 7)).square().mean())
            optimizer.zero_grad()
            session.backward(session.module(data(mesh.rank, step)).square().mean())
            session.optimizer.step()
            optimizer.zero_grad()
        state = copy.deepcopy(optimizer.state_dict())
        values = session.module.state_dict()
        messages += [told(optimizer.step), told(lambda: optimizer.add_param_group({"params": []}))]
        session.close()
        again = seeded(Net)
        again.load_state_dict(values)
        other = adam(again)
        with sharded(again, other, plan, mesh) as session:
            other.load_state_dict(state)
            session.backward(session.module(data(mesh.rank, 2)).square().mean())
            session.optimizer.step()
            found = session.module.state_dict()
        return found, state, messages


@pytest.mark.parametrize("name", ["zero3", *full(*[name for name in ROWS if name != "zero3"])])
def test_the_given_optimizer_answers_as_the_sessions_does(name: str) -> None:
    """``zero_grad()`` dropped nothing, and ``state_dict()`` had this rank's parts."""
    for ranks in (1, 2):
        model = seeded(Net)
        optimizer = adam(model)
        for step in range(3):
            for rank in range(ranks):
                (model(data(rank, step)).square().mean() / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                expected = copy.deepcopy(optimizer.state_dict())
        every = run_ranks(ranks, own_methods, ROWS[name])
        check([found for found, *_ in every], dict(model.state_dict()), f"{name}, {ranks} ranks")
        for _, state, messages in every:
            assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in expected["param_groups"]]
            assert state["state"].keys() == expected["state"].keys()
            for number, entry in expected["state"].items():
                assert_close(state["state"][number], entry, 1e-11, f"state of {number}, {name}")
            assert "call step() of session.optimizer (or" in messages[0] and "add the group before" in messages[1]


def misuses(plan: Plan) -> dict[str, str]:
    model = seeded(Net)
    optimizer = adam(model)
    found = {}
    with one_mesh(plan) as mesh:
        session = build(model, optimizer, plan, mesh)
        session.backward(session.module(data(mesh.rank, 0)).square().mean())
        session.optimizer.step()
        param = model.first.weight
        state: Any = optimizer.state
        assert session.optimizer.state is state and state and not any(each is param for each in state)
        uses: dict[str, Callable[[], object]] = {
            "read": lambda: state[param],
            "asked": lambda: param in state,
            "got": lambda: state.get(param),
            "set": lambda: state.__setitem__(param, {}),
            "updated": lambda: state.update({param: {}}),
            "replaced": lambda: setattr(session.optimizer, "state", {param: {}}),
        }
        count = len(state)
        found |= {what: told(use) for what, use in uses.items()}
        found |= {what: told(partial(copied, state), TypeError) for what, copied in COPIES.items()}
        assert len(state) == count and dict(state).keys() == copy.copy(state).keys()
        session.unshard()
        assert "zero_grad" not in vars(optimizer)
        model(data(0, 0)).sum().backward()
        optimizer.zero_grad()
        assert param.grad is None
        found["step"] = told(optimizer.step)
        found["load"] = told(lambda: optimizer.load_state_dict({}))
        found["again"] = told(lambda: build(model, optimizer, plan, mesh), ValueError)
    return found


def add_state_hooks(optimizer: Any, seen: list[str]) -> None:
    """What they are called with counts as it does in torch."""

    def given(own: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("given")
        return {**state, "mine": len(state["state"])}

    def taken(own: Any, state: dict[str, Any]) -> None:
        seen.append(f"taken {state.pop('mine')}")
        state["param_groups"] = [{**group, "lr": 0.25} for group in state["param_groups"]]

    optimizer.register_state_dict_pre_hook(lambda own: seen.append("wanted"))
    optimizer.register_state_dict_post_hook(given)
    optimizer.register_load_state_dict_pre_hook(taken)
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(f"loaded {own.param_groups[0]['lr']}"))


def state_hooks(by_session: bool) -> list[str]:
    model, seen = seeded(Net), list[str]()
    optimizer = adam(model)
    with sharded(model, optimizer, zero(3)) as session:
        mine = session.optimizer if by_session else optimizer
        add_state_hooks(mine, seen)
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
        session.optimizer.step()
        state = mine.state_dict()
        mine.load_state_dict(state)
        assert state["mine"] and state["param_groups"][0]["lr"] == 0.05
    return seen


@pytest.mark.parametrize("by_session", [False, True])
def test_hooks_on_the_state_are_called(by_session: bool) -> None:
    model, expected = seeded(Net), list[str]()
    optimizer = adam(model)
    add_state_hooks(optimizer, expected)
    model(data(0, 0)).square().mean().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert run_ranks(2, state_hooks, by_session) == [expected] * 2 and len(expected) == 4


COPIES: dict[str, Callable[[Any], object]] = {"copied": copy.deepcopy, "pickled": pickle.dumps}


@pytest.mark.parametrize("name", ["zero3", *full("zero2")])
def test_what_no_sharded_optimizer_has_is_an_error(name: str) -> None:
    """State of a whole parameter, a state that others could read, a second session."""
    for ranks in (1, 2):
        for found in run_ranks(ranks, misuses, ROWS[name]):
            said = {what: found.pop(what) for what in ("step", "load", "again", *COPIES)}
            assert all("optimizer.state['first.weight']" in message for message in found.values()), found
            assert all("use state_dict(), on every rank" in said[what] for what in COPIES)
            assert "make a new one on model.parameters()" in said["step"]
            assert "no longer sharded since unshard()" in said["load"]
            assert "optimizer Adam was given to boost/build before" in said["again"]
