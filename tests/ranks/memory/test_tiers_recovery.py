"""Going on after a failure around a disk: nothing is applied twice, and no rank is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_setup import one_mesh
from sets import full
from tier_setup import (
    Fault,
    backward,
    everything,
    session_of,
    small_tiles,
    with_tiers,
)

from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.memory.disk.store import DiskError
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks

BF16 = torch.bfloat16


# ---- no rank raises alone


def trains_after_a_failed_load(plan: Plan, root: str) -> tuple[int, bool]:
    """Writes of rank 0 fail while a checkpoint is loaded, earlier or later; each time training goes on regardless."""
    failed = 0
    with small_tiles(), one_mesh(plan) as mesh, Fault().installed() as fault:
        with session_of(plan, "adamw", mesh) as session:
            backward(session, 0)
            session.optimizer.step()
            session.checkpoints.save(root, "one")
            expected = everything(session)
        for at in range(1, 1000, 3):
            # Not stepped yet, so that the load makes the records of optimizer state.
            with session_of(plan, "adamw", mesh) as session:
                if mesh.rank == 0:
                    fault.arm(at, writing=True)
                try:
                    session.checkpoints.load(root, "one")
                    return failed, everything(session) == expected
                except (DiskError, CheckpointError):
                    failed += 1
                finally:
                    fault.lift()
                backward(session, 1)
                session.optimizer.step()
    return failed, False


@pytest.mark.parametrize("mix", ["s_disk", *full("all_disk")])
def test_training_goes_on_after_a_failed_load(mix: str, tmp_path: Path) -> None:
    plan = with_tiers(zero(3, BF16), mix, str(tmp_path / "disk"))
    for failed, same in run_ranks(2, trains_after_a_failed_load, plan, str(tmp_path / "runs"), timeout=120.0):
        assert failed >= 2 and same


def taken_over_in_part(plan: Plan) -> str:
    """A master could not be written when changed parameters were taken over; the next pass reads it ahead."""
    with (
        small_tiles(),
        one_mesh(plan) as mesh,
        Fault().installed() as fault,
        session_of(plan, "adamw", mesh) as session,
    ):
        backward(session, 0)
        session.optimizer.step()
        if mesh.rank == 0:
            fault.arm(0, writing=True)
        with pytest.raises(DiskError), session.module.gathered(write_back=True):
            pass
        fault.lift()
        backward(session, 1)
        with pytest.raises(DiskError) as error:
            session.optimizer.step()
        return str(error.value)


def test_what_cannot_be_read_ahead_is_told_by_step(tmp_path: Path) -> None:
    for message in run_ranks(2, taken_over_in_part, with_tiers(zero(2, BF16), "s_disk", str(tmp_path))):
        assert "\n  rank 0: DiskError" in message and "is not complete" in message and "rank 1" not in message
