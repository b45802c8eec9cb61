"""torch.distributed.checkpoint of sharded models: what fully_shard gives and takes, in files that both read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as theirs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise
import shardwise.pytorch.state_dict as ours
from shardwise.core.mesh import Mesh
from shardwise.plan import zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import check, data, seeded, told
from tests.support.on_ranks import on_ranks

FULL = StateDictOptions(full_state_dict=True)
FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[3].bias.requires_grad_(False)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; a frozen parameter is in one of them."""
    groups = [{"params": list(model[0].parameters()), "lr": 0.01}, {"params": list(model[2:].parameters())}]
    return torch.optim.AdamW(groups, lr=0.05)


def steps(model: nn.Module, backward: Any, optimizer: Any, count: int = 2) -> None:
    for step in range(count):
        backward(model(data(0, step)).square().mean())  # the same on every rank
        optimizer.step()
        optimizer.zero_grad()


def by_torch(seed: int = 0, count: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(net, seed)
    fully_shard(model)
    optimizer = adam(model)
    steps(model, lambda loss: loss.backward(), optimizer, count)
    return model, optimizer


def sharded(stage: int, seed: int = 0, count: int = 2) -> Session:
    model = seeded(net, seed)
    session = shardwise.shard(model, adam(model), stage=stage)
    steps(session.module, session.backward, session.optimizer, count)
    return session


def same(found: Any, wanted: Any, where: str = "") -> None:
    """The same containers, with tensors of the same kinds, placements and values."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted) or set(found) == set(wanted), (where, list(found), list(wanted))
        for key in wanted:
            same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for at, each in enumerate(wanted):
            same(found[at], each, f"{where}/{at}")
    elif isinstance(wanted, DTensor):
        assert isinstance(found, DTensor) and found.placements == wanted.placements and found.shape == wanted.shape, (
            where
        )
        assert found.to_local().shape == wanted.to_local().shape, where
        torch.testing.assert_close(found.to_local(), wanted.to_local(), rtol=1e-11, atol=1e-14, msg=where)
    elif isinstance(wanted, Tensor):
        assert not isinstance(found, DTensor), where
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14, msg=where)
    else:
        assert found == wanted, (where, found, wanted)


def as_theirs(stage: int, plain: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Tensor]:
    session = sharded(stage)
    for options in (None, FULL, FIRST, FLAT, StateDictOptions(cpu_offload=True, ignore_frozen_params=True)):
        wanted = theirs.get_state_dict(plain, optimizer, options=options)
        found = ours.get_state_dict(session.module, session.optimizer, options=options)
        same(found[0], wanted[0], "weights")
        same(found[1], wanted[1], "optimizer")
    whole = session.module.state_dict()
    other = sharded(stage, seed=7, count=1)
    for options in (None, FLAT, FULL):
        given = ours.get_state_dict(session.module, session.optimizer, options=options)
        taken = {"model_state_dict": given[0], "optim_state_dict": given[1]}
        ours.set_state_dict(other.module, other.optimizer, **taken, options=options)
        same(ours.get_state_dict(other.module, other.optimizer, options=FULL)[1], ours_full(session), "taken")
        steps(other.module, other.backward, other.optimizer, 1)
    if stage == 3:
        weights, state = ours.get_state_dict(session.module, session.optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=os.path.join(folder, "ours"))
        refused(session, plain)
    first = ours.get_model_state_dict(session.module, options=FIRST)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ours.set_model_state_dict(other.module, first, options=spread)
    check([other.module.state_dict()], whole, "from rank 0")
    for each in (session, other):
        each.close()
        each.mesh.close()
    return whole


@on_ranks(2)
@pytest.mark.full
def test_states_at_stage_1_are_those_of_fully_shard() -> None:
    plain, optimizer = by_torch()
    as_theirs(1, plain, optimizer, "")


def on_rank(folder: str) -> dict[str, Tensor]:
    plain, optimizer = by_torch()
    whole = as_theirs(3, plain, optimizer, folder)
    weights, state = theirs.get_state_dict(plain, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=os.path.join(folder, "theirs"))
    into_torch(folder, whole)
    return whole


def ours_full(session: Session) -> dict[str, Any]:
    return ours.get_optimizer_state_dict(session.module, session.optimizer, options=FULL)


def into_torch(folder: str, whole: dict[str, Tensor]) -> None:
    """What we wrote, in a model under fully_shard with other values."""
    model, optimizer = by_torch(seed=7)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=os.path.join(folder, "ours"))
    theirs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    found = theirs.get_model_state_dict(model, options=FULL)
    check([dict(found)], whole, "fully_shard")


def refused(session: Session, plain: nn.Module) -> None:
    use = "shardwise.pytorch.state_dict"
    assert use in told(lambda: theirs.get_optimizer_state_dict(session.module, session.optimizer))
    assert use in told(lambda: theirs.get_state_dict(session.module, session.optimizer))
    assert use in told(lambda: theirs.set_model_state_dict(session.module, session.module.state_dict(), options=FULL))
    assert "give session.module" in told(lambda: ours.get_model_state_dict(plain), TypeError)
    assert "give session.optimizer" in told(
        lambda: ours.get_optimizer_state_dict(session.module, session.optimizer.optimizer), TypeError
    )
    state = ours_full(session)
    state["state"].pop("0.weight")
    assert "no optimizer state for 0.weight (1 of 6)" in told(
        lambda: ours.set_optimizer_state_dict(session.module, session.optimizer, state)
    )
    fresh = sharded(3, count=0)
    assert "session.checkpoints.load(directory) reads" in told(
        lambda: ours.get_optimizer_state_dict(fresh.module, fresh.optimizer)
    )
    fresh.close()
    fresh.mesh.close()


def test_states_are_those_of_fully_shard_and_files_go_both_ways(tmp_path: Path) -> None:
    whole = run_ranks(2, on_rank, str(tmp_path))[0]
    # In one process, from files that two ranks wrote: into plain torch, and into a session of ours.
    model = seeded(net, 7)
    weights = dict(model.state_dict())
    dcp.load({"model": weights}, checkpoint_id=str(tmp_path / "ours"), no_dist=True)
    check([weights], whole, "plain torch")
    for name in ("ours", "theirs"):
        session = sharded(3, seed=7)
        session.checkpoints.load(str(tmp_path / name))
        check([session.module.state_dict()], whole, name)
        steps(session.module, session.backward, session.optimizer, 1)
        session.close()
        session.mesh.close()
    assert not dist.is_initialized() or dist.get_world_size() == 1


@on_ranks(2)
def test_a_model_of_some_ranks_is_refused() -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    plan = zero(2)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm, groups[dist.get_rank()])
    model = nn.Linear(2, 4)
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, mesh)
    with pytest.raises(NotImplementedError, match="a model of 1 of 2 ranks"):
        ours.get_model_state_dict(session.module)
    session.close()
