"""Going on after a failure around a disk: nothing is applied twice, and no rank is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.core.memory.disk.store import DiskError
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import one_mesh
from tests.support.tier_setup import Fault, backward, session_of, small_tiles, with_tiers

BF16 = torch.bfloat16


def taken_over_in_part(plan: Plan) -> tuple[str, str]:
    """A master could not be written when changed parameters were taken over: nothing goes on until both are loaded."""
    with (
        small_tiles(),
        one_mesh(plan) as mesh,
        Fault().installed() as fault,
        session_of(plan, "adamw", mesh) as session,
    ):
        backward(session, 0)
        session.optimizer.step()
        saved = session.module.state_dict()
        if mesh.rank == 0:
            fault.arm(0, writing=True)
        with pytest.raises(DiskError) as error, session.module.gathered(write_back=True):
            pass
        fault.lift()
        with pytest.raises(RuntimeError) as refused:
            backward(session, 1)
        session.module.load_state_dict(saved)
        backward(session, 1)
        session.optimizer.step()
        return str(error.value), str(refused.value)


def test_changes_that_cannot_be_written_break_the_session(tmp_path: Path) -> None:
    for message, refused in run_ranks(2, taken_over_in_part, with_tiers(zero(2, BF16), "s_disk", str(tmp_path))):
        assert "\n  rank 0: DiskError" in message and "rank 1" not in message
        assert "gathered(write_back=True)" in refused and "load a checkpoint" in refused
