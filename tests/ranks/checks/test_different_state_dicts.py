"""State dicts that differ between ranks: loading one raises on every rank, and changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.comm import PeerError
from shardwise.plan import zero
from shardwise.session import Session, build
from tests.support.checkpoint_setup import differences, everything
from tests.support.engine_setup import PLANS, adam, data, one_mesh, scaler, seeded, sharded
from tests.support.on_ranks import on_ranks
from tests.support.sets import campaign, full

State = dict[str, Any]
Change = Callable[[State, int], State]
ALL = ["ddp", "zero1", "zero2", "zero3", "zero3_gloo"]


class Net(nn.Module):
    """A network with a buffer that each rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def trained(plan: str, mesh: Any, steps: int = 1) -> Session:
    model = seeded(Net)
    session = build(model, adam(model), PLANS[plan], mesh)
    for step in range(steps):
        one_step(session, step)
    return session


def one_step(session: Session, step: int) -> None:
    session.backward(session.module(data(session.mesh.rank, step)).square().mean())
    session.optimizer.step()
    session.optimizer.zero_grad()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError, PeerError)) as error:
        call()
    return f"{error.typename}: {error.value}"


# ---- the model


def alone(state: State, rank: int) -> State:
    return state if rank == 0 else {}


def part(state: State, rank: int) -> State:
    return {name: value for name, value in state.items() if rank == 0 or not name.startswith("last")}


def other_values(state: State, rank: int) -> State:
    return state | {"last.weight": state["last.weight"] + rank}


def other_dtype(state: State, rank: int) -> State:
    return state | {"last.weight": state["last.weight"].to(torch.float64 if rank == 0 else torch.float32)}


def other_shape(state: State, rank: int) -> State:
    return state if rank == 0 else state | {"last.weight": torch.zeros(4, 6)}


MODELS: dict[Change, tuple[str, str]] = {
    alone: ("norm.running_mean in the state is on rank 0 and not on rank 1",) * 2,
    part: ("last.weight in the state is on rank 0 and not on rank 1",) * 2,
    other_values: ("a sample of the values of last.weight in the state is ",) * 2,
    other_dtype: ("dtype of last.weight in the state is 'torch.float32' on rank 1 and 'torch.float64' on rank 0",) * 2,
    other_shape: (
        "loading the model failed:\n  rank 1: RuntimeError: the state does",
        "RuntimeError: the state does not fit the model",
    ),
}


CASES = [
    (plan, change, (place + turn) % 2 == 0, (place + turn) % 3 == 0)
    for place, plan in enumerate(ALL)
    for turn, change in enumerate(MODELS)
]


QUICK = {("ddp", other_values), ("zero1", other_shape), ("zero2", part), ("zero3", alone), ("zero3_gloo", other_dtype)}


@on_ranks(2)
@pytest.mark.parametrize(
    ("plan", "change", "strict", "own"),
    [*(case for case in CASES if case[:2] in QUICK), *full(*(case for case in CASES if case[:2] not in QUICK))],
)
def test_model_states_that_differ_are_refused(plan: str, change: Change, strict: bool, own: bool) -> None:
    """Load into the sharded module or into the user's ``own``; then a state that is equal on all ranks loads."""
    with one_mesh(PLANS[plan]) as mesh:
        session = trained(plan, mesh)
        whole = seeded(Net, 7).state_dict()
        before = session.module.state_dict()
        module = session.model if own else session.module
        given = change(whole, mesh.rank)
        said = refused(lambda: module.load_state_dict(given, strict=strict))
        if strict and change in (alone, part):
            assert said.startswith("RuntimeError" if mesh.rank else "PeerError") and "does not fit the model" in said
        else:
            assert MODELS[change][mesh.rank] in said, said
            assert said.startswith("ValueError") or change is other_shape
        assert not differences(before, session.module.state_dict()), "something was written"
        if own:  # the module checks the keys itself, but only after the comparison of the ranks
            with session.module.gathered(write_back=True):
                said = refused(lambda: session.model.load_state_dict(given, strict=strict))
            assert said.startswith("ValueError: the ranks disagree on loading the model")
            assert not differences(before, session.module.state_dict()), "something was written inside gathered()"
        one_step(session, 1)
        module.load_state_dict(whole)
        assert not differences(dict(whole), session.module.state_dict())
        one_step(session, 2)
        session.close()


@on_ranks()
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("zero1", 1),
        ("zero3", 2),
        *full(*((plan, 2) for plan in ALL if plan != "zero3")),
        *campaign(*((plan, 1) for plan in ALL if plan != "zero1")),
    ],
)
def test_buffers_may_differ_between_ranks(plan: str, ranks: int) -> None:
    """Each rank's own buffers are restored, and values that the state lacks do not change."""
    with one_mesh(PLANS[plan]) as mesh:
        session = trained(plan, mesh, 2)
        best = {name: value.clone() for name, value in session.module.state_dict().items()}
        one_step(session, 2)
        assert differences(best, session.module.state_dict())
        session.module.load_state_dict(best)
        assert not differences(best, session.module.state_dict())
        given = {"last.bias": best["last.bias"] + 1.0, "more": torch.tensor(float(mesh.rank))}
        found = session.module.load_state_dict(given, False)
        assert "first.weight" in found.missing_keys and found.unexpected_keys == ["more"]
        assert differences(best, session.module.state_dict()) == ["last.bias"]
        session.close()


# ---- the optimizer


def empty(state: State, rank: int) -> State:
    return state if rank == 0 else state | {"state": {}}


def other_rate(state: State, rank: int) -> State:
    state["param_groups"][0]["lr"] = 0.25 + rank
    return state


def other_moments(state: State, rank: int) -> State:
    state["state"][0]["exp_avg"] += rank
    return state


def other_step(state: State, rank: int) -> State:
    state["state"][1]["step"] += rank
    return state


def other_groups(state: State, rank: int) -> State:
    if rank == 1:
        state["param_groups"][0]["params"].pop()
    return state


OPTIMIZERS: dict[Change, tuple[str, str]] = {
    empty: ("exp_avg of first.weight in the state is on rank 0 and not on rank 1",) * 2,
    other_rate: ("lr of group 0 in the state is 1.25 on rank 1 and 0.25 on rank 0",) * 2,
    other_moments: ("a sample of the values of exp_avg of first.weight in the state is ",) * 2,
    other_step: ("a sample of the values of step of first.bias in the state is ",) * 2,
    other_groups: (
        "PeerError: loading the Adam failed:\n  rank 1: ValueError: the state has",
        "ValueError: the state has param groups of [5] parameters",
    ),
}


def moments(session: Session) -> State:
    return {name: value for name, value in everything(session).items() if name.startswith("0/")}


QUICK_MOMENTS = [("ddp", empty), ("zero2", other_rate), ("zero3_gloo", other_moments), ("zero2", other_step)]
QUICK_MOMENTS += [("ddp", other_groups)]
MOMENTS = [(plan, change) for plan in ("ddp", "zero2", "zero3_gloo") for change in OPTIMIZERS]


@on_ranks(2)
@pytest.mark.parametrize(
    ("plan", "change"), [*QUICK_MOMENTS, *full(*(case for case in MOMENTS if case not in QUICK_MOMENTS))]
)
def test_optimizer_states_that_differ_are_refused(plan: str, change: Change) -> None:
    with one_mesh(PLANS[plan]) as mesh:
        session = trained(plan, mesh)
        saved, as_saved = session.optimizer.state_dict(), moments(session)
        one_step(session, 1)
        before = everything(session)
        given = change(copy.deepcopy(saved), mesh.rank)
        assert OPTIMIZERS[change][mesh.rank] in refused(lambda: session.optimizer.load_state_dict(given))
        assert not differences(before, everything(session))
        session.optimizer.load_state_dict(saved)
        assert not differences(as_saved, moments(session))
        one_step(session, 2)
        session.close()


# ---- the loss scale


SCALER = scaler(hysteresis=2)


LOADED = "ValueError: the ranks disagree on "
HAD = "RuntimeError: the ranks hold different gradients: loss scale of the gradients"


@on_ranks(2)
@pytest.mark.parametrize(("stage", "by_state"), [(3, True), (1, False), *full((2, True), (3, False))])
def test_loss_scales_that_differ_are_refused(stage: int, by_state: bool) -> None:
    """One rank loads another loss scale (``by_state``), or sets it in its scaler."""
    model = nn.Linear(4, 3)
    plan = zero(stage, torch.float16).but(scaler=SCALER)
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.125), plan) as session:
        own, scaler = session.optimizer, session.optimizer.scaler

        def train() -> None:
            session.backward(session.module(torch.ones(2, 4)).float().mean())
            own.step()
            own.zero_grad()

        train()
        saved, before, scale = own.state_dict(), session.module.state_dict(), scaler.scale
        other = saved["scaler"] | {"scale": scale / (2 if session.mesh.rank == 0 else 1)}
        if by_state:
            said = refused(lambda: own.load_state_dict(copy.deepcopy(saved) | {"scaler": other}))
            assert scaler.scale == scale
        else:
            scaler.load_state_dict(other)
            said = refused(train)
            own.zero_grad()
            assert not differences(before, session.module.state_dict())
        assert said.startswith(LOADED if by_state else HAD), said
        assert "is 1024.0 on rank 1 and 512.0 on rank 0" in said, said
        own.load_state_dict(saved)
        train()
        assert scaler.scale == scale
