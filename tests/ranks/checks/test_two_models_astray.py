"""Two equal models on one mesh whose passes come in another order on each rank: told, never one's gradients for the
other's. In the same order they train as by themselves."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import PeerError
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, data, one_mesh, seeded
from tests.support.engine_setup import two_layers as net
from tests.support.sets import full


def pair(mesh: Mesh, plan: Plan) -> list[Session]:
    models = [seeded(net, seed) for seed in (0, 1)]
    return [build(model, adam(model), plan, mesh) for model in models]


def astray(name: str, way: str) -> str:
    plan = PLANS[name]
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    sessions = pair(mesh, plan)
    order = sessions if mesh.rank == 0 else sessions[::-1]
    x = data(mesh.rank, 0)
    told = ""
    try:
        if way == "one loss":
            # The last to be used is the first to be reached in backward.
            sum(session.module(x).square().sum() for session in order).backward()  # type: ignore[union-attr]
        elif way == "plain":
            for loss in [session.module(x).square().sum() for session in order]:
                loss.backward()
        else:
            losses = [session.module(x).square().sum() for session in sessions]
            for index in range(2) if mesh.rank == 0 else (1, 0):
                sessions[index].backward(losses[index])
    except PeerError as error:
        told = str(error)
    dist.barrier()
    return told


WAYS = ("passes", "plain", "one loss")
QUICK = [("ddp", "one loss"), ("zero1", "plain"), ("zero2", "passes"), ("zero2_gloo", "one loss")]
QUICK += [("zero3_gloo", "passes")]
ASTRAY = [(name, way) for name in ("ddp", "zero1", "zero2", "zero2_gloo") for way in WAYS]


@pytest.mark.parametrize(("name", "way"), [*QUICK, *full(*(case for case in ASTRAY if case not in QUICK))])
def test_passes_in_another_order_are_told(name: str, way: str) -> None:
    for told in run_ranks(2, astray, name, way):
        first, second = "of model 1 of the mesh (Sequential)", "of model 2 of the mesh (Sequential)"
        assert first in told and second in told and "of several models in the same order" in told, told


def in_order(name: str) -> bool:
    with one_mesh(PLANS[name]) as mesh:
        sessions = pair(mesh, PLANS[name])
        for step in range(2):
            losses = [session.module(data(mesh.rank, step, i)).square().sum() for i, session in enumerate(sessions)]
            (losses[0] + losses[1]).backward()
            for session in sessions:
                session.optimizer.step()  # type: ignore[union-attr]
        together = [session.module.state_dict() for session in sessions]
        for session in sessions:
            session.close()
        alone = pair(mesh, PLANS[name])
        for i, session in enumerate(alone):
            for step in range(2):
                session.backward(session.module(data(mesh.rank, step, i)).square().sum())
                session.optimizer.step()  # type: ignore[union-attr]
        states = [session.module.state_dict() for session in alone]
        for session in alone:
            session.close()
    return all(torch.equal(a[n], b[n]) for a, b in zip(together, states, strict=True) for n in a)


@pytest.mark.parametrize("name", ["zero2", *full("zero2_gloo", "zero3_gloo")])
def test_passes_in_one_order_train_each_model(name: str) -> None:
    assert all(run_ranks(2, in_order, name))


def forked() -> list[object]:
    """A child that closes its copies of session and mesh; its parent goes on."""
    found: list[object] = []
    for name in ("zero2", "zero2_gloo"):
        with one_mesh(PLANS[name]) as mesh:
            session = pair(mesh, PLANS[name])[0]
            session.backward(session.module(data(mesh.rank, 0)).square().sum())
            session.optimizer.step()  # type: ignore[union-attr]
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
            found.append(os.waitpid(child, 0)[1])
            dist.barrier()
            session.backward(session.module(data(mesh.rank, 1)).square().sum())
            session.optimizer.step()  # type: ignore[union-attr]
            session.close()
    return found


def test_a_forked_child_closes_nothing_of_its_parent() -> None:
    for found in run_ranks(2, forked):
        assert found == [0, 0]
