"""Models in stages whose data is on the host and on a disk: the same steps and states, and disks that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_pipeline_engine import LR, MAX_NORM, ONE, ZBV, Steps, batch_of, case_of, plain, train
from test_pipeline_stages import criterion

from shardwise.core.memory.disk.store import DiskError
from shardwise.plan import PipelinePlan, Plan
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.checkpoint_setup import differences
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.sets import full
from tests.support.tensor_setup import Exact
from tests.support.tier_setup import Fault, with_tiers


@pytest.mark.parametrize(
    ("name", "mix", "pipeline", "tp"),
    [("zero3", "all_disk", ONE, 1), *full(("zero2", "thirds", ZBV, 1), ("zero1", "thirds", ONE, 2))],
)
def test_tiers_change_nothing(name: str, mix: str, pipeline: PipelinePlan, tp: int, tmp_path: Path) -> None:
    plan = with_tiers(PLANS[name], mix, str(tmp_path)).but(pp=2, tp=tp, max_norm=MAX_NORM, pipeline=pipeline)
    train(4, plan, "llama", 1, pipeline.microbatches, timeout=240)


def one_step(session: Session, step: int) -> None:
    with Exact():
        session.pipeline.step(batch_of(session.mesh.rank, step), criterion, train=True)
    session.optimizer.step()


def states(session: Session) -> dict[str, Any]:
    found = {f"model.{name}": value for name, value in session.module.state_dict().items()}
    for number, entry in session.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in entry.items()}
    return found


def failing(plan: Plan, frozen: bool, expected: Steps) -> list[str]:
    """A disk fails on one rank, while a state is put together and in an update, after which states are loaded. The
    second stage is not trained if it is ``frozen``, so it has no state on a disk."""
    model, told = case_of("llama", 0 if frozen else 1).made(), []
    for module in (*model.model.layers[3:], model.model.norm, model.lm_head) if frozen else ():
        module.requires_grad_(False)
    with Fault().installed() as fault, sharded(model, adam(model, LR), plan) as session:
        optimizer = session.optimizer
        one_step(session, 0)
        before = states(session)
        stores = session.mesh.mesh_group.exchange_object(session.engine.shards.storage.store is not None)
        assert stores == [True, True, not frozen, not frozen]
        fails = len(stores) - 1 - stores[::-1].index(True)
        told.append(str(fails))
        if session.mesh.mesh_group.rank == fails:
            fault.arm(0, writing=False)
        with pytest.raises(DiskError) as raised:
            optimizer.state_dict()
        told.append(str(raised.value))
        fault.lift()
        parameters, moments = session.module.state_dict(), optimizer.state_dict()
        assert not differences(states(session), before)
        with Exact():
            session.pipeline.step(batch_of(session.mesh.rank, 1), criterion, train=True)
        if session.mesh.mesh_group.rank == fails:
            fault.arm(0, forever=False)
        with pytest.raises(DiskError) as raised:
            optimizer.step()
        told.append(str(raised.value))
        fault.lift()
        optimizer.zero_grad()
        session.module.load_state_dict(parameters)
        optimizer.load_state_dict(moments)
        assert not differences(states(session), before)
        with Exact():
            session.pipeline.step(batch_of(session.mesh.rank, 1), criterion, train=True)
        optimizer.step()
        if frozen:
            assert differences(states(session), before)
            return told
        values = expected[1][-1]
        state = session.module.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-9, "after two steps")
    return told


@pytest.mark.parametrize("frozen", [*full(False), True])
def test_a_disk_that_fails_is_told_to_ranks_with_other_stages(frozen: bool, tmp_path: Path) -> None:
    plan = with_tiers(PLANS["zero1"], "all_disk", str(tmp_path)).but(pp=2, max_norm=MAX_NORM, pipeline=ONE)
    plan = plan.but(tiers=replace(plan.tiers, param_disk_fraction=0.0))
    found = run_ranks(4, failing, plan, frozen, plain("llama", 1, 5, 2, 3), timeout=120)
    for fails, *told in found:
        assert len(told) == 2 and fails == found[0][0]
        assert all(f"rank {fails}: " in each for each in told), told


def of_both(plan: Plan) -> str:
    """States of parts of stages are whole, and come back; a disk that cannot be read is told to all."""
    model = case_of("llama", 1).made()
    with Fault().installed() as fault, sharded(model, adam(model, LR), plan) as session:
        mesh, optimizer = session.mesh, session.optimizer
        assert optimizer is not None and session.engine.shards.storage.store is not None
        assert mesh.stage_group.size * mesh.pipeline.size == mesh.mesh_group.size == 4
        one_step(session, 0)
        before = states(session)
        if mesh.mesh_group.rank == 2:
            fault.arm(0, writing=False)
        with pytest.raises(DiskError) as raised:
            optimizer.state_dict()
        fault.lift()
        parameters, moments = session.module.state_dict(), optimizer.state_dict()
        one_step(session, 1)
        assert differences(states(session), before)
        session.module.load_state_dict(parameters)
        optimizer.load_state_dict(moments)
        assert not differences(states(session), before)
    return str(raised.value)


@pytest.mark.full
def test_parts_of_stages_on_a_disk(tmp_path: Path) -> None:
    plan = with_tiers(PLANS["zero1"], "all_disk", str(tmp_path)).but(pp=2, tp=2, max_norm=MAX_NORM, pipeline=ONE)
    found = run_ranks(4, of_both, plan, timeout=120)
    assert all("rank 2: " in told for told in found), found
