"""Training on hosts with several ranks each, as in plain PyTorch.

Ranks of one host of which one comes later than the time-out, or fails alone: all drop the same, and train on.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.comm import PeerError, SharedGroup
from shardwise.core.comm.shared import CHECK_S
from shardwise.core.mesh import Mesh
from shardwise.plan import zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, check, data, one_mesh, run_plain, run_sharded, sharded
from tests.support.meetings_setup import fails_and_goes_on
from tests.support.scope import PER_HOST, hosts_of
from tests.support.sets import campaign, full

WIDTH, LAYERS = 32, 4


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def several(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    for index in range(2):
        yield model(data(rank, step, index, WIDTH)).square().mean(), False


def on_hosts(per_host: int, *args: Any) -> Any:
    with hosts_of(per_host):
        return run_sharded(*args)


@pytest.mark.parametrize("size", [4, *campaign(3)])
@pytest.mark.parametrize("name", ["zero1", "zero3_straddling", *full("ddp", "zero2", "zero3", "half", "zero3_tensor")])
def test_training_is_that_of_plain_torch(name: str, size: int) -> None:
    found = run_ranks(size, on_hosts, PER_HOST, layers, several, PLANS[name], 3)
    check(found, run_plain(layers, several, size, 3), f"{name} of {size} ranks")


def failing() -> list[str]:
    with hosts_of(PER_HOST):
        return fails_and_goes_on(zero(3).but(same_order=False))


def test_a_rank_that_fails_goes_on() -> None:
    ends = run_ranks(4, failing)
    assert all(each[-1] == "made 2" for each in ends) and "ArithmeticError" in ends[1]


def on_its_host(per_host: int) -> tuple[str, dict[str, Tensor]]:
    plan = zero(3).but(secondary="host")
    with hosts_of(per_host), one_mesh(plan) as mesh:
        return repr(mesh.secondary), run_sharded(layers, several, plan, 3, mesh)


@pytest.mark.parametrize(
    ("per_host", "group"), [(2, "SharedGroup('secondary', rank"), *full((4, "None"), (1, "None"), (3, "None"))]
)
def test_secondary_shards_are_placed_inside_a_host_by_themselves(per_host: int, group: str) -> None:
    found = run_ranks(4, on_its_host, per_host)
    assert all(told.startswith(group) and ("of 2" in told) == (per_host == 2) for told, _ in found)
    check([state for _, state in found], run_plain(layers, several, 4, 3), "secondary shards of each host")


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
