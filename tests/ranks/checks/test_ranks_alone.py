"""One rank alone in a call that every rank has to make: each is told what the other was doing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import PeerError
from shardwise.core.mesh import Mesh
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, data, seeded
from tests.support.engine_setup import two_layers as net
from tests.support.groups_setup import waits_at_most
from tests.support.sets import full

WAITS_S = 600.0
"""A rank that waits so long is not told at once: the limit of ``run_ranks`` comes first."""
Call = Callable[[Session, str], object]


def save(session: Session, folder: str) -> object:
    return session.checkpoints.save(folder, "alone")


def load(session: Session, folder: str) -> object:
    return session.checkpoints.load(folder, "before")


def model_state(session: Session, _: str) -> object:
    return session.module.state_dict()


def optimizer_state(session: Session, _: str) -> object:
    return session.optimizer.state_dict()


def load_weights(session: Session, _: str) -> object:
    return session.module.load_state_dict(seeded(net).state_dict())


def load_moments(session: Session, _: str) -> object:
    model = seeded(net)
    plain = adam(model)
    model(data(0, 0)).sum().backward()
    plain.step()
    return session.optimizer.load_state_dict(plain.state_dict())


def one_value(session: Session, _: str) -> object:
    found = session.one(session.params[0])
    assert found is not None
    return found.value()


def gathered(session: Session, _: str) -> None:
    with session.module.gathered(write_back=True):
        pass


def train(session: Session, _: str) -> None:
    session.backward(session.module(data(session.mesh.rank, 1)).square().sum())
    session.optimizer.step()  # type: ignore[union-attr]


def nothing(session: Session, _: str) -> None:
    pass


CALLS: dict[Call, str] = {
    save: "saving checkpoint 'alone' in ",
    load: "loading checkpoint 'before' of ",
    model_state: "state_dict() of the model",
    optimizer_state: "state_dict() of an optimizer",
    load_weights: "load_state_dict() of the model",
    load_moments: "load_state_dict() of an optimizer",
    one_value: "reading a parameter",
    gathered: "gathered(",
}


def alone(plan: str, first: Call, second: Call, folder: str, in_vain: bool = False) -> str:
    """Rank 0 makes the first call, rank 1 the second; ``in_vain``: rank 0 waits a second for it."""
    group = dist.new_group(timeout=timedelta(seconds=WAITS_S), backend="gloo")
    chosen = PLANS[plan].but(same_order=False)  # in program order who trains over gloo waits for a gather
    mesh = Mesh.create(chosen.mesh, torch.device("cpu"), chosen.comm, group)
    model = seeded(net)
    session = build(model, adam(model), chosen, mesh)
    train(session, folder)
    session.checkpoints.save(folder, "before")
    session.backward(session.module(data(mesh.rank, 0)).square().sum())
    told = ""
    with waits_at_most(1.0) if in_vain and mesh.rank == 0 else nullcontext():
        try:
            (first if mesh.rank == 0 else second)(session, folder)
        except PeerError as error:
            told = str(error)
    dist.barrier()
    return told


TWO = ("zero3", "zero3_gloo")
QUICK = [(call, "zero3" if call is gathered else TWO[number % 2]) for number, call in enumerate(CALLS)]
CASES = [(call, plan) for call in CALLS for plan in TWO if (call, plan) != (gathered, "zero3_gloo")]


@pytest.mark.parametrize(("call", "plan"), [*QUICK, *full(*(case for case in CASES if case not in QUICK))])
def test_a_rank_that_trains_on_and_one_that_is_alone_in_a_call_are_told_at_once(
    call: Call, plan: str, tmp_path: object
) -> None:
    first, second = run_ranks(2, alone, plan, call, train, str(tmp_path))
    assert CALLS[call] in first, first
    assert CALLS[call] in second, second


def test_two_different_calls_are_told_of_each_other(tmp_path: object) -> None:
    for told in run_ranks(2, alone, "zero3", save, load, str(tmp_path)):
        assert "rank 0: what saving needs (1 values) while saving checkpoint 'alone' in " in told
        assert "rank 1: what loading needs (1 values) while loading checkpoint 'before' of " in told
        assert "every rank has to make such a call" in told


@pytest.mark.parametrize("plan", ["zero3", *full("zero3_gloo")])
def test_who_waits_in_vain_says_in_what_and_who_did_not_come(plan: str, tmp_path: object) -> None:
    told, _ = run_ranks(2, alone, plan, save, nothing, str(tmp_path), True)
    assert "rank 0 is in: saving checkpoint 'alone' in " in told, told
    assert "rank 1 is in no such call, its last was: saving checkpoint 'before' in " in told, told
