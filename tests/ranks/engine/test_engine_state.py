"""Full states: equal to plain torch's, into plain torch and back at other stages and world sizes; what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, check, seeded, sharded
from tests.support.sets import campaign, full

ROWS = 12  # divides by 1, 2, 3 and 4 ranks
State = dict[str, Any]


class Net(nn.Module):
    """Tied, frozen, unused and scalar parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.unused = nn.Linear(2, 3)
        self.register_buffer("offset", torch.arange(7.0))
        self.register_buffer("seen", torch.tensor(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + 0.01 * self.offset.to(x.dtype)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.frozen
        return x * self.scale


def two_groups(model: nn.Module) -> list[State]:
    params = list(model.named_parameters())
    return [
        {"params": [p for n, p in params if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in params if "weight" not in n], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(two_groups(m), lr=0.05, eps=1e-4),
    "sgd": lambda m: torch.optim.SGD(two_groups(m), lr=0.05, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(two_groups(m), lr=0.05, initial_accumulator_value=0.2),
    "nadam": lambda m: torch.optim.NAdam(two_groups(m), lr=0.05, eps=1e-4),
}


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain_steps(kind: str, first: int, last: int, state: tuple[State, State] | None = None) -> tuple[State, State]:
    """Model and optimizer state after plain steps ``first .. last - 1``."""
    model = seeded(Net, seed=first)
    if state is None:
        model = seeded(Net)
    optimizer = OPTIMIZERS[kind](model)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in range(first, last):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def sharded_steps(
    plan: Plan, kind: str, first: int, last: int, state: tuple[State, State] | None
) -> tuple[State, State]:
    model = seeded(Net, seed=17 * first)  # other weights than the state's, where there is one
    with sharded(model, OPTIMIZERS[kind](model), plan) as session:
        if state is not None:
            found = session.module.load_state_dict(state[0])
            assert not found.missing_keys and not found.unexpected_keys
            session.optimizer.load_state_dict(state[1])
        for step in range(first, last):
            mine = batch(step).chunk(session.mesh.size)[session.mesh.rank]
            session.backward(session.module(mine).square().mean())
            session.optimizer.step()
        return session.module.state_dict(), session.optimizer.state_dict()


def flat(state: State) -> dict[str, Tensor]:
    """Optimizer state by a name each, numbers as tensors."""
    entries = {f"{i}.{k}": torch.as_tensor(v) for i, entry in state["state"].items() for k, v in entry.items()}
    return {name: value.double() for name, value in entries.items()}


FROZEN = 4
"""The frozen parameter's number in the optimizer. Adagrad makes state for it that no step uses; ours keeps none."""


def without_frozen(state: State) -> State:
    return state | {"state": {number: entry for number, entry in state["state"].items() if number != FROZEN}}


def same_state(actual: tuple[State, State], expected: tuple[State, State], what: str) -> None:
    actual, expected = (actual[0], without_frozen(actual[1])), (expected[0], without_frozen(expected[1]))
    assert list(actual[0]) == list(expected[0])
    assert_close(actual[0], expected[0], 1e-11, what)
    assert list(actual[1]["state"]) == list(expected[1]["state"])
    assert_close(flat(actual[1]), flat(expected[1]), 1e-11, what)
    for ours, theirs in zip(actual[1]["param_groups"], expected[1]["param_groups"], strict=True):
        assert ours == theirs
    for entry, other in zip(actual[1]["state"].values(), expected[1]["state"].values(), strict=True):
        for key in other:
            assert type(entry[key]) is type(other[key])
            assert getattr(entry[key], "shape", None) == getattr(other[key], "shape", None)


COUNTS = {"adam": 7, "adagrad": 4, "sgd": 3, "nadam": 3}
assert COUNTS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *[(kind, count) for kind, count in COUNTS.items() if kind == "nadam"],
        *full(*[(kind, count) for kind, count in COUNTS.items() if kind != "nadam"]),
        *campaign(*[(kind, 7) for kind in COUNTS if COUNTS[kind] < 7]),
    ],
)
def test_through_plain_torch_and_other_stages_and_world_sizes(kind: str, count: int) -> None:
    """zero3 on 2 ranks, plain torch, zero1 on 3, hybrid on 4, ddp on 2, gloo zero3 on 3: one training.

    Optimizers after the first go to the first ``count`` of these stations.
    """
    expected: tuple[State, State] | None = None
    state: tuple[State, State] | None = None
    stations = [("zero3", 2), ("plain", 1), ("zero1", 3), ("hybrid", 4), ("ddp", 2), ("zero3_gloo", 3), ("half", 2)]
    for index, (name, world_size) in enumerate(stations[:count]):
        expected = plain_steps(kind, 2 * index, 2 * index + 2, expected)
        if name == "plain":
            state = plain_steps(kind, 2 * index, 2 * index + 2, state)
        else:
            states = run_ranks(world_size, sharded_steps, PLANS[name], kind, 2 * index, 2 * index + 2, state)
            for other in states[1:]:
                check([other[0]], states[0][0], "every rank has it", rtol=0.0)
            state = states[0]
        same_state(state, expected, f"{kind} after {name} on {world_size}")


def bf16_state(name: str) -> tuple[State, State, State]:
    """A state is exact: bf16 training goes on bit for bit, from masters and not from rounded weights."""

    def session_of(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Net()
        return sharded(model, torch.optim.Adam(model.parameters(), lr=1e-3), zero(int(name[-1]), torch.bfloat16))

    def step(session: Any, number: int) -> None:
        x = batch(number).float().chunk(2)[session.mesh.rank]
        session.backward(session.module(x).float().square().mean())
        session.optimizer.step()

    with session_of(0) as session:
        for number in range(3):
            step(session, number)
        model_state, optimizer_state = session.module.state_dict(), session.optimizer.state_dict()
        step(session, 3)
        straight = session.module.state_dict()
    with session_of(1) as session:
        session.module.load_state_dict(model_state)
        session.optimizer.load_state_dict(optimizer_state)
        step(session, 3)
        return straight, session.module.state_dict(), model_state


@pytest.mark.parametrize("name", ["zero3", *full("zero1", "zero2")])
def test_sixteen_bit_training_resumes_bit_for_bit(name: str) -> None:
    for straight, resumed, halfway in run_ranks(2, bf16_state, name):
        assert straight["first.weight"].dtype == torch.float32
        assert not torch.equal(halfway["first.weight"], halfway["first.weight"].bfloat16().float())
        check([resumed], straight, name, rtol=0.0)


def wrong_states(plan: Plan) -> tuple[list[str], bool]:
    model = seeded(Net)
    messages = []
    with sharded(model, OPTIMIZERS["adam"](model), plan) as session:
        before = session.module.state_dict()
        state = {name: value + 1 if value.is_floating_point() else value for name, value in before.items()}
        bad = {n: v for n, v in state.items() if not n.startswith("unused")} | {"new": torch.ones(1)}
        bad["first.weight"] = torch.ones(7, 4)
        for strict in (True, False):
            try:
                session.module.load_state_dict(bad, strict=strict)
            except RuntimeError as error:
                messages.append(str(error))
        optimizer_state = session.optimizer.state_dict()
        groups = optimizer_state["param_groups"]
        for change in (groups[:1], groups[::-1]):
            try:
                session.optimizer.load_state_dict(optimizer_state | {"param_groups": change})
            except ValueError as error:
                messages.append(str(error))
        after = session.module.state_dict()
        unchanged = all(torch.equal(after[n], before[n]) for n in before)
        del state["scale"], state["blocks.1.weight"]
        found = session.module.load_state_dict(state | {"new": torch.ones(1)}, strict=False)
        messages.append(f"{found.missing_keys} {found.unexpected_keys}")
        partly = session.module.state_dict()
        assert all(torch.equal(partly[n], state[n]) for n in state)
        assert torch.equal(partly["scale"], before["scale"])
        return messages, unchanged


@pytest.mark.parametrize("name", ["zero3", *full("zero1")])
def test_states_that_do_not_fit_are_refused_whole(name: str) -> None:
    for messages, unchanged in run_ranks(2, wrong_states, PLANS[name]):
        strict, lax, fewer, swapped, partly = messages
        assert "unused.weight" in strict and "unused.bias" in strict and "'new'" in strict
        assert all("first.weight: (7, 4) instead of (7, 5)" in message for message in (strict, lax))
        assert "param groups of" in fewer and "param groups of" in swapped
        assert unchanged
        assert partly == "['scale'] ['new']"


def scheduled(plan: Plan, when: str) -> tuple[State, list[float]]:
    """A scheduler on the user's optimizer (before) or on the session's (after)."""
    model = seeded(Net)
    optimizer = OPTIMIZERS["sgd"](model)
    rates = []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if when == "before" else None
    with sharded(model, optimizer, plan) as session:
        if scheduler is None:
            scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, 1, gamma=0.5)
        for step in range(4):
            mine = batch(step).chunk(session.mesh.size)[session.mesh.rank]
            session.backward(session.module(mine).square().mean())
            session.optimizer.step()
            scheduler.step()
            rates.append(session.optimizer.param_groups[1]["lr"])
            assert session.optimizer.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"]
        return session.module.state_dict(), rates


@pytest.mark.parametrize("when", ["after", *full("before")])
@pytest.mark.filterwarnings("error")
def test_learning_rate_schedulers(when: str) -> None:
    model = seeded(Net)
    optimizer = OPTIMIZERS["sgd"](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(4):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    for name in ("zero1", "zero3"):
        results = run_ranks(2, scheduled, PLANS[name], when)
        check([state for state, _ in results], dict(model.state_dict()), name)
        assert all(rates == [0.01, 0.005, 0.0025, 0.00125] for _, rates in results)
