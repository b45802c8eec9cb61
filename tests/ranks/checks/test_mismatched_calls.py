"""Ranks that make different collective calls, or run two models in another order: errors on all ranks name the calls.

Two equal models on one mesh must never get each other's gradients; in the same order they train as they do alone.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import PeerError
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, adam, data, one_mesh, seeded
from tests.support.engine_setup import two_layers as net
from tests.support.groups_setup import waits_at_most
from tests.support.on_ranks import on_ranks, peer_error
from tests.support.sets import full

WAITS_S = 600.0
"""Longer than the limit of ``run_ranks``, so that an error after this time-out fails the test."""
Call = Callable[[Session, str], object]


def gathered(session: Session, _: str) -> None:
    with session.module.gathered(write_back=True):
        pass


def load_weights(session: Session, _: str) -> object:
    return session.module.load_state_dict(seeded(net).state_dict())


def train(session: Session, _: str) -> None:
    session.backward(session.module(data(session.mesh.rank, 1)).square().sum())
    session.optimizer.step()  # type: ignore[union-attr]


CALLS: dict[str, tuple[Call, str]] = {
    "save": (lambda session, folder: session.checkpoints.save(folder, "alone"), "saving checkpoint 'alone' in "),
    "load": (lambda session, folder: session.checkpoints.load(folder, "before"), "loading checkpoint 'before' of "),
    "state": (lambda session, _: session.module.state_dict(), "state_dict() of the model"),
    "moments": (lambda session, _: session.optimizer.state_dict(), "state_dict() of an optimizer"),
    "load weights": (load_weights, "load_state_dict() of the model"),
    "load moments": (
        lambda session, _: session.optimizer.load_state_dict(adam(seeded(net)).state_dict()),
        "load_state_dict() of an optimizer",
    ),
    "one value": (lambda session, _: session.one(session.params[0]).value(), "reading a parameter"),
    "gathered": (gathered, "gathered("),
    "train": (train, ""),
    "nothing": (lambda session, _: None, ""),
}


def alone(plan: str, first: str, second: str, folder: str, in_vain: bool = False) -> str:
    """Make the first call on rank 0 and the second on rank 1; with ``in_vain``, rank 0 waits at most one second."""
    group = dist.new_group(timeout=timedelta(seconds=WAITS_S), backend="gloo")
    chosen = PLANS[plan].but(same_order=False)  # in program order, a training rank would wait for a gather over gloo
    mesh = Mesh.create(chosen.mesh, torch.device("cpu"), chosen.comm, group)
    model = seeded(net)
    session = build(model, adam(model), chosen, mesh)
    train(session, folder)
    session.checkpoints.save(folder, "before")
    session.backward(session.module(data(mesh.rank, 0)).square().sum())
    with waits_at_most(1.0) if in_vain and mesh.rank == 0 else nullcontext():
        return peer_error(lambda: CALLS[second if mesh.rank else first][0](session, folder))


TWO = ("zero3", "zero3_gloo")
EACH = list(CALLS)[:-2]
QUICK = [(call, "zero3" if call == "gathered" else TWO[number % 2]) for number, call in enumerate(EACH)]
CASES = [(call, plan) for call in EACH for plan in TWO if (call, plan) != ("gathered", "zero3_gloo")]


@pytest.mark.parametrize(("call", "plan"), [*QUICK, *full(*(case for case in CASES if case not in QUICK))])
def test_collective_call_against_training_raises_at_once(call: str, plan: str, tmp_path: object) -> None:
    for told in run_ranks(2, alone, plan, call, "train", str(tmp_path)):
        assert CALLS[call][1] in told, told


def test_two_different_calls_name_each_other(tmp_path: object) -> None:
    for told in run_ranks(2, alone, "zero3", "save", "load", str(tmp_path)):
        assert "rank 0: what saving needs (1 values) while saving checkpoint 'alone' in " in told
        assert "rank 1: what loading needs (1 values) while loading checkpoint 'before' of " in told
        assert "make the same calls and passes on all ranks" in told


@pytest.mark.parametrize("plan", ["zero3", *full("zero3_gloo")])
def test_timeout_names_the_call_and_the_missing_rank(plan: str, tmp_path: object) -> None:
    told, _ = run_ranks(2, alone, plan, "save", "nothing", str(tmp_path), True)
    assert "rank 0 is in: saving checkpoint 'alone' in " in told, told
    assert "rank 1 is in no such call, its last was: saving checkpoint 'before' in " in told, told


def pair(mesh: Mesh, plan: Plan) -> list[Session]:
    models = [seeded(net, seed) for seed in (0, 1)]
    return [build(model, adam(model), plan, mesh) for model in models]


WAYS = ("passes", "plain", "one loss")
ASTRAY_QUICK = [("ddp", "one loss"), ("zero1", "plain"), ("zero2", "passes"), ("zero2_gloo", "one loss")]
ASTRAY_QUICK += [("zero3_gloo", "passes")]
ASTRAY = [(name, way) for name in ("ddp", "zero1", "zero2", "zero2_gloo") for way in WAYS]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "way"), [*ASTRAY_QUICK, *full(*(case for case in ASTRAY if case not in ASTRAY_QUICK))]
)
def test_passes_of_models_in_another_order_raise(name: str, way: str) -> None:
    plan = PLANS[name]
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    sessions = pair(mesh, plan)
    order = sessions if mesh.rank == 0 else sessions[::-1]
    with pytest.raises(PeerError) as error:
        # Backward starts with the model that was used last.
        used = order if way != "passes" else sessions
        losses = [session.module(data(mesh.rank, 0)).square().sum() for session in used]
        if way == "one loss":
            sum(losses).backward()
        for session in order if way != "one loss" else ():
            session.backward(losses[used.index(session)])
    for model in (1, 2):
        assert f"of model {model} of the mesh (Sequential)" in str(error.value)
    assert "of several models in the same order" in str(error.value)
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("name", ["zero2", *full("zero2_gloo", "zero3_gloo")])
def test_passes_of_models_in_one_order_train_each_model(name: str) -> None:
    with one_mesh(PLANS[name]) as mesh:
        together, alone = pair(mesh, PLANS[name]), pair(mesh, PLANS[name])
        for step in range(2):
            sum(
                session.module(data(mesh.rank, step, i)).square().sum() for i, session in enumerate(together)
            ).backward()
            for session in together:
                session.optimizer.step()
        for i, session in enumerate(alone):
            for step in range(2):
                session.backward(session.module(data(mesh.rank, step, i)).square().sum())
                session.optimizer.step()
            assert_close(session.module.state_dict(), together[i].module.state_dict(), 0.0, f"model {i}")
        for session in (*together, *alone):
            session.close()


@on_ranks(2)
def test_close_in_a_forked_child_does_not_affect_the_parent() -> None:
    for name in ("zero2", "zero2_gloo"):
        with one_mesh(PLANS[name]) as mesh:
            session = pair(mesh, PLANS[name])[0]
            train(session, "")
            dist.barrier()
            child = os.fork()
            if child == 0:
                try:
                    mesh.close()
                    for group in mesh.groups:
                        group.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            dist.barrier()
            train(session, "")
            session.close()
