"""Ranks of one host of which one comes later than the time-out, or fails alone: all drop the same, and train on."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.comm import PeerError, SharedGroup
from shardwise.core.comm.shared import CHECK_S
from shardwise.core.mesh import Mesh
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, one_mesh, sharded
from tests.support.sets import full

RATE, NEVER_S = 0.5, 600.0


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def patience(mesh: Mesh, timeout_s: float) -> None:
    for group in (mesh.shard, mesh.replicate, mesh.world, mesh.mesh_group):
        if isinstance(group, SharedGroup):
            group.timeout_s = timeout_s


def train(mesh: Mesh, session: Session, step: int) -> None:
    session.backward(session.module(batch(mesh.rank, step)).square().mean())
    session.optimizer.step()
    session.optimizer.zero_grad()


def too_late(mesh: Mesh, session: Session) -> None:
    """The second rank comes to the end of a pass when the first has given it up, and both drop it."""
    patience(mesh, 0.3)
    if mesh.rank:
        dist.barrier()
    with pytest.raises(PeerError, match="waited" if mesh.rank == 0 else "gave it up before all had come"):
        train(mesh, session, 100)
    if not mesh.rank:
        dist.barrier()
    patience(mesh, NEVER_S)


def one_pass_too_late(plan: str) -> dict[str, Tensor]:
    with one_mesh(PLANS[plan]) as mesh:
        model = made()
        with sharded(model, torch.optim.SGD(model.parameters(), RATE), PLANS[plan], mesh) as session:
            train(mesh, session, 0)
            too_late(mesh, session)
            session.module.zero_grad()
            for step in range(1, 5):
                if step % 2 == mesh.rank:
                    time.sleep(3 * CHECK_S)
                train(mesh, session, step)
            return {name: value.clone() for name, value in session.module.state_dict().items()}


def plain() -> dict[str, Tensor]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.cat([batch(0, step), batch(1, step)])).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("plan", ["zero2", *full("ddp", "zero1", "zero3")])
def test_a_pass_that_one_rank_has_given_up_counts_on_none(plan: str) -> None:
    """Within 1e-5 of plain training without that pass; the replicas are the same bit for bit."""
    first, second = run_ranks(2, one_pass_too_late, plan)
    for name, expected in plain().items():
        torch.testing.assert_close(first[name], expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(first[name], second[name])
