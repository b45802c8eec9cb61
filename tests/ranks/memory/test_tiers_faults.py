"""A disk that fails: every rank is told, and goes on from what it loads."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.core.memory.disk import file
from shardwise.core.memory.disk.store import DiskError, DiskStore
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import RankError, run_ranks
from tests.support.engine_setup import one_mesh
from tests.support.sets import campaign, full
from tests.support.tier_setup import (
    Fault,
    backward,
    batch,
    everything,
    make_net,
    session_of,
    small_tiles,
    undisturbed,
    with_tiers,
)

BF16, FP32 = torch.bfloat16, None


def requests_fail(plan: Plan, kind: str, failing_rank: int, every: int) -> tuple[int, list[str], bool]:
    """In the first and the third step requests fail, one in each try, until none is left to fail. After each failure
    the state before the step is loaded.

    Args:
        every: of so many requests of the third step one fails; 1 for all in turn. In the first step, which makes
            records as well, one of three times as many.

    Returns:
        How many steps failed, their messages, and whether all state was right at the end.
    """
    messages: list[str] = []
    with small_tiles(), one_mesh(plan) as mesh:
        expected = undisturbed(plan, kind, mesh, 4)
        with Fault().installed() as fault, session_of(plan, kind, mesh) as session:
            for step in range(4):
                saved, before = states(session), everything(session)
                for at in range(0, 1000 if step in (0, 2) else 0, 3 * every if step == 0 else every):
                    backward(session, step)
                    if mesh.rank == failing_rank:
                        fault.arm(at)
                    try:
                        session.optimizer.step()
                        break
                    except DiskError as error:
                        messages.append(str(error))
                    finally:
                        fault.lift()
                    load_after_failure(session, saved)
                    after = everything(session)
                    assert after == before, (step, at, [key for key in before if after[key] != before[key]])
                if step not in (0, 2):
                    backward(session, step)
                    session.optimizer.step()
            found = everything(session)
    return len(messages), messages, found == expected


def states(session: Any) -> tuple[Any, Any]:
    """Of the model and of its optimizer."""
    return session.module.state_dict(), session.optimizer.state_dict()


def load_after_failure(session: Any, saved: tuple[Any, Any]) -> None:
    """A step is refused until both are loaded."""
    for state, target in zip(saved, (session.module, session.optimizer), strict=True):
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            session.optimizer.step()
        session.optimizer.zero_grad()
        target.load_state_dict(state)


CASES = [
    ("s_disk", zero(2, BF16), "adamw", 3),
    ("s_disk", zero(1), "adagrad", 3),
    ("p_host_s_disk", zero(3, BF16), "sgd", 3),
    ("all_disk", zero(3, BF16), "adamw", 2),
]
"""With which requests fail."""
IDS = [pytest.param(*case, id=f"{case[0]}-{case[2]}") for case in CASES]
ALL_REQUESTS = [pytest.param(*case[:3], 1, id=f"{case[0]}-{case[2]}-all") for case in CASES if case[3] > 1]


@pytest.mark.parametrize(("mix", "plan", "kind", "every"), [IDS[1], *full(IDS[0], *IDS[2:]), *campaign(*ALL_REQUESTS)])
def test_after_a_failed_step_the_state_before_it_can_be_loaded(
    mix: str, plan: Plan, kind: str, every: int, tmp_path: Path
) -> None:
    plan = with_tiers(plan, mix, str(tmp_path))
    results = run_ranks(2, requests_fail, plan, kind, 1, every, timeout=120.0)
    for count, messages, same in results:
        assert count == results[0][0] >= 4
        assert same
        for message in messages:
            # The failing rank, a record, what happened and what to do, on every rank.
            assert "\n  rank 1: DiskError" in message and "rank 0" not in message, message
            assert "record '" in message and "EIO" in message and "load a checkpoint" in message, message
    names = " ".join(results[0][1])
    for word in ("master weights", "optimizer state") if mix == "s_disk" else ():
        assert word in names
    assert not list(tmp_path.iterdir())


def gather_fails(plan: Plan) -> tuple[list[str], bool]:
    """Reads of parameters fail in forward and in backward; the step is made again from its start."""
    messages = []
    with one_mesh(plan) as mesh:
        expected = undisturbed(plan, "adamw", mesh, 2)
        with Fault().installed() as fault, session_of(plan, "adamw", mesh) as session:
            for step in range(2):
                for at in range(1000):
                    if mesh.rank == 0:
                        fault.arm(at, writing=False)
                    try:
                        backward(session, step)
                        break
                    except RuntimeError as error:
                        messages.append(str(error))
                        session.optimizer.zero_grad()
                    finally:
                        fault.lift()
                session.optimizer.step()
            return messages, everything(session) == expected


@pytest.mark.parametrize("world_size", [2, *full(1)])
def test_a_gather_that_fails_is_repeated(world_size: int, tmp_path: Path) -> None:
    # Nothing else is read from the disk.
    plan = with_tiers(zero(3, BF16), "p_disk_s_host", str(tmp_path))
    for messages, same in run_ranks(world_size, gather_fails, plan):
        assert len(messages) >= 4 and same
        assert all("parameters of chunk" in message for message in messages)


# ---- no space, no directory


@contextlib.contextmanager
def _reservation_fails(at: int) -> Iterator[None]:
    count = iter(range(1000))
    real = os.posix_fallocate

    def fallocate(*args: Any) -> None:
        if next(count) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    with mock.patch.object(os, "posix_fallocate", fallocate):
        yield


def build_fails(plan: Plan, how: str) -> tuple[str, list[str]]:
    """Rank 1 cannot build, so nobody does; a second try works."""
    model = make_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with one_mesh(plan) as mesh:
        with _no_disk(how if mesh.rank == 1 else ""), pytest.raises(DiskError) as error:
            build(model, torch.optim.AdamW(model.parameters()), plan, mesh)
        dist.barrier()
        left = os.listdir(plan.tiers.disk.directory)
        dist.barrier()
        if how != "write":
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with session_of(plan, "adamw", mesh) as session:
            backward(session, 0)
            session.optimizer.step()
        return str(error.value), left


@contextlib.contextmanager
def _no_disk(how: str) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "read-only":
        refused = mock.Mock(side_effect=OSError(errno.EROFS, "read-only"))
        with mock.patch.object(file.os, "mkdir", refused):
            yield
    elif how == "EFBIG":
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 4096, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    elif how == "ENOSPC":
        with _reservation_fails(2):
            yield
    elif how == "write":
        with Fault().installed() as fault:
            fault.arm(3)
            yield
    else:
        yield


@pytest.mark.parametrize("how", ["EFBIG", "ENOSPC", *full("read-only", "write")])
def test_a_disk_that_cannot_be_used_is_known_to_all_when_building(how: str, tmp_path: Path) -> None:
    found = {"read-only": "EROFS", "write": "EIO"}.get(how, how)
    # Without shared memory, whose files the limit would meet first.
    for mix in ("all_disk", "s_disk"):
        plan = with_tiers(zero(3, BF16).but(shared_memory=False), mix, str(tmp_path))
        for message, left in run_ranks(2, build_fails, plan, how):
            assert "rank 1: DiskError" in message and found in message and "rank 0" not in message
            assert how == "write" or left == []


# ---- loading


def load_fails(plan: Plan) -> tuple[str, str, bool]:
    """Writes fail on rank 0 while a state is loaded, which is loaded again."""
    with small_tiles(), one_mesh(plan) as mesh:
        expected = undisturbed(plan, "adamw", mesh, 3)
        with session_of(plan, "adamw", mesh) as session:
            for step in range(2):
                backward(session, step)
                session.optimizer.step()
            model_state, state = session.module.state_dict(), session.optimizer.state_dict()
        with Fault().installed() as fault, session_of(plan, "adamw", mesh) as session:
            backward(session, 7)
            session.optimizer.step()
            if mesh.rank == 0:
                fault.arm(5, writing=True)
            with pytest.raises(DiskError) as optimizer_error:
                session.optimizer.load_state_dict(state)
            fault.lift()
            if mesh.rank == 0:
                fault.arm(3, writing=True)
            with pytest.raises(DiskError) as model_error:
                session.module.load_state_dict(model_state)
            fault.lift()
            session.module.load_state_dict(model_state)
            session.optimizer.load_state_dict(state)
            backward(session, 2)
            session.optimizer.step()
            return str(optimizer_error.value), str(model_error.value), everything(session) == expected


@pytest.mark.parametrize("mix", ["s_disk", *full("all_disk")])
def test_loading_that_fails_can_be_repeated(mix: str, tmp_path: Path) -> None:
    for optimizer, model, same in run_ranks(2, load_fails, with_tiers(zero(3, BF16), mix, str(tmp_path))):
        assert "rank 0" in optimizer and "load it again" in optimizer
        assert "rank 0" in model and "load them again" in model
        assert same


# ---- killed


def dies_in_a_step(plan: Plan) -> None:
    model = make_net()
    session = build(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), plan)
    backward(session, 0)
    session.optimizer.step()
    backward(session, 1)
    real, count = DiskStore.write, iter(range(1000))

    def write(self: DiskStore, *args: Any) -> Any:
        if session.mesh.rank == 1 and next(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args)

    with mock.patch.object(DiskStore, "write", write):
        session.optimizer.step()


def trains(plan: Plan) -> list[str]:
    with one_mesh(plan) as mesh, session_of(plan, "adamw", mesh) as session:
        removed = list(session.engine.shards.storage.store.removed)
        backward(session, 0)
        session.optimizer.step()
        with torch.no_grad():
            session.module(batch(0, 0))
        return removed


def test_a_killed_rank_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = with_tiers(zero(2, BF16), "all_disk", str(tmp_path))
    with pytest.raises(RankError) as error:
        run_ranks(2, dies_in_a_step, plan)
    # Or the other rank, which misses it, is the first to be heard of.
    assert error.value.exit_code == -signal.SIGKILL or "killed by SIGKILL" in str(error.value)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2
    # The data had no name any more; what is left is a lock.
    assert {p.name for path in tmp_path.iterdir() for p in path.iterdir()} == {"lock"}
    removed = run_ranks(2, trains, plan)
    assert {name for names in removed for name in names} == left
    assert not list(tmp_path.iterdir())
