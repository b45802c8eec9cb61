"""CPU and NVMe offload: bytes by tier and kind, disk traffic, buffer counts, and disks that fail.

With Psi parameters in bf16, fp32 masters and Adam on N ranks, in K equal units that N divides: parameters 2 Psi / N (at
stages 1 and 2, 2 Psi on the device), masters 4 Psi / N, moments 8 Psi / N and a step count of 4 bytes per shard,
gradients 2 Psi / N with the state, but on the host where the state is on a disk; exchange buffers on the device.

A record of B bytes moves ``pages(B)``, B rounded up to 4096. A step with everything on the disk and one tile per unit
reads the shard for every gather, and once the masters and (from the second step on) the moments; it writes once the
shard, the masters and the moments. Updates during backward change none of it.

After a disk error every rank raises, and training goes on from a loaded state. ``tests/unit/memory/test_disk_io.py``
tests the faults of the store itself; here they occur under a plan, and under a DeepSpeed configuration.
"""

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
from torch import nn

from shardwise.core.base.sizes import size_text
from shardwise.core.memory.disk import rank_file
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.mesh import Mesh
from shardwise.plan import ByModule, Plan, zero
from shardwise.session import build
from shardwise.testing import RankError, run_ranks
from tests.support.counters import live_tensor_bytes
from tests.support.engine_setup import one_mesh, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.tier_setup import (
    SHARES,
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

BF16 = torch.bfloat16


def requests_fail(plan: Plan, kind: str, failing_rank: int, every: int) -> tuple[int, list[str], bool]:
    """Let requests fail in the first and the third step, one in each try, until every chosen one has failed.

    The state before the step is loaded after each failure.

    Args:
        every: one of so many requests of the third step fails; with 1 all fail in turn. In the first step, which also
            creates records, one of three times as many fails.

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
    """Return the states of the model and of its optimizer."""
    return session.module.state_dict(), session.optimizer.state_dict()


def load_after_failure(session: Any, saved: tuple[Any, Any]) -> None:
    """Check that a step is refused until both are loaded."""
    for state, target in zip(saved, (session.module, session.optimizer), strict=True):
        raises(RuntimeError, "load a checkpoint", lambda: session.optimizer.step())
        session.optimizer.zero_grad()
        target.load_state_dict(state)


CASES = [
    ("s_disk", zero(2, BF16), "adamw", 3),
    ("s_disk", zero(1), "adagrad", 3),
    ("p_host_s_disk", zero(3, BF16), "sgd", 3),
    ("all_disk", zero(3, BF16), "adamw", 2),
]
"""Mix, plan, optimizer, and one of how many requests fails."""
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
            # Every rank's message names the failing rank, the record, the error and the remedy.
            assert "\n  rank 1: DiskError" in message and "rank 0" not in message, message
            assert "record '" in message and "EIO" in message and "load a checkpoint" in message, message
    names = " ".join(results[0][1])
    for word in ("master weights", "optimizer state") if mix == "s_disk" else ():
        assert word in names
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [2, *full(1)])
@on_ranks()
def test_failed_gather_is_repeated(ranks: int, tmp_path: Path) -> None:
    """Reads of parameters fail in forward and in backward; the step is repeated from its start."""
    # The disk has parameters only.
    plan, messages = with_tiers(zero(3, BF16), "p_disk_s_host", str(tmp_path)), list[str]()
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
            assert everything(session) == expected
    assert len(messages) >= 4 and all("parameters of chunk" in message for message in messages)


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


@pytest.mark.parametrize("mix", ["all_disk", "s_disk"])
@pytest.mark.parametrize("how", ["EFBIG", "ENOSPC", *full("read-only", "write")])
@on_ranks(2)
def test_unusable_disk_fails_the_build_on_all_ranks(how: str, mix: str, tmp_path: Path) -> None:
    """Rank 1 cannot build, so no rank does; a second try succeeds."""
    # Without shared memory: the limit would apply to its files first.
    plan, model = with_tiers(zero(3, BF16).but(shared_memory=False), mix, str(tmp_path)), make_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with one_mesh(plan) as mesh:
        with _no_disk(how if mesh.rank == 1 else ""):
            said = raises(
                DiskError, "rank 1: DiskError", build, model, torch.optim.AdamW(model.parameters()), plan, mesh
            )
        assert {"read-only": "EROFS", "write": "EIO"}.get(how, how) in said and "rank 0" not in said
        dist.barrier()
        left = os.listdir(tmp_path)
        dist.barrier()
        if how != "write":
            assert left == []
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with session_of(plan, "adamw", mesh) as session:
            backward(session, 0)
            session.optimizer.step()


@contextlib.contextmanager
def _no_disk(how: str) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "read-only":
        refused = mock.Mock(side_effect=OSError(errno.EROFS, "read-only"))
        with mock.patch.object(rank_file.os, "mkdir", refused):
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


# ---- loading


@pytest.mark.parametrize("mix", ["s_disk", *full("all_disk")])
@on_ranks(2)
def test_failed_load_can_be_repeated(mix: str, tmp_path: Path) -> None:
    """Writes fail on rank 0 while a state is loaded; then it is loaded again."""
    plan = with_tiers(zero(3, BF16), mix, str(tmp_path))
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
            assert "load it again" in raises(DiskError, "rank 0", session.optimizer.load_state_dict, state)
            fault.lift()
            if mesh.rank == 0:
                fault.arm(3, writing=True)
            assert "load them again" in raises(DiskError, "rank 0", session.module.load_state_dict, model_state)
            fault.lift()
            session.module.load_state_dict(model_state)
            session.optimizer.load_state_dict(state)
            backward(session, 2)
            session.optimizer.step()
            assert everything(session) == expected


# ---- killed


def dies_in_a_step(plan: Plan) -> None:
    real, count = DiskStore.write, iter(range(1000))

    def write(self: DiskStore, *args: Any) -> Any:
        if dist.get_rank() == 1 and next(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args)

    with one_mesh(plan) as mesh, session_of(plan, "adamw", mesh) as session:
        backward(session, 0)
        session.optimizer.step()
        backward(session, 1)
        with mock.patch.object(DiskStore, "write", write):
            session.optimizer.step()


def trains(plan: Plan) -> list[str]:
    with one_mesh(plan) as mesh, session_of(plan, "adamw", mesh) as session:
        removed = list(session._engine.shards.storage.store.removed)
        backward(session, 0)
        session.optimizer.step()
        with torch.no_grad():
            session.module(batch(0, 0))
        return removed


def test_a_killed_rank_leaves_no_files(tmp_path: Path) -> None:
    plan = with_tiers(zero(2, BF16), "all_disk", str(tmp_path))
    with pytest.raises(RankError) as error:
        run_ranks(2, dies_in_a_step, plan)
    # The error of the other rank, which misses the killed one, may arrive first.
    assert error.value.exit_code == -signal.SIGKILL or "killed by SIGKILL" in str(error.value)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2
    # The data files were unlinked before; only a lock is left.
    assert {p.name for path in tmp_path.iterdir() for p in path.iterdir()} == {"lock"}
    removed = run_ranks(2, trains, plan)
    assert {name for names in removed for name in names} == left
    assert not list(tmp_path.iterdir())


WIDTH, DEPTH = 64, 4
UNIT = WIDTH * WIDTH + WIDTH
PSI = UNIT * DEPTH
PIECES = 2 * 4 * 2 * DEPTH  # upper bound: a weight and a bias, split between two ranks, 4 bytes each


def pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


Found = dict[str, Any]


def measure(plan: Plan, mesh: Mesh, steps: int) -> Found:
    before = live_tensor_bytes()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    traffic = []
    with sharded(model, torch.optim.Adam(model.parameters()), plan, mesh) as session:
        for _ in range(steps):
            session.reset_traffic()
            session.backward(session.module(torch.randn(2, WIDTH)).float().square().mean())
            report = session.memory()
            session.optimizer.step()
            traffic.append(session.traffic())
        store = session._engine.shards.storage.store
        return {
            "by_tier": report.by_tier,
            "after": session.memory().by_tier,
            "total": report.total_bytes,
            "traffic": traffic,
            "live": live_tensor_bytes() - before,
            "buffers": store.buffer_bytes if store is not None else 0,
            "on_disk": store.reserved_bytes if store is not None else 0,
            "described": session.describe().splitlines(),
        }


def measure_all(plans: list[Plan], steps: int) -> list[Found]:
    """Measure each plan in turn on a rank, in one mesh."""
    with one_mesh(plans[0]) as mesh:
        return [measure(plan, mesh, steps) for plan in plans]


def by_plan(ranks: int, plans: list[Plan], steps: int = 2) -> list[list[Found]]:
    """Return what each rank measured, by plan."""
    return [list(found) for found in zip(*run_ranks(ranks, measure_all, plans, steps), strict=True)]


def plan_of(stage: int, mix: str, directory: str) -> Plan:
    plan = zero(stage, torch.bfloat16).but(packing=ByModule(unit_classes=()), prefetch=0)
    return with_tiers(plan, mix, directory) if mix != "device" else plan


def home(host: float, disk: float) -> str:
    return "host" if host == 1 else "disk" if disk == 1 else "device"


@pytest.mark.parametrize("stage", [3, *full(1, 2)])
def test_bytes_by_tier_and_kind(stage: int, tmp_path: Path) -> None:
    mixes = [mix for mix in SHARES if mix != "thirds"]
    plans = [plan_of(stage, mix, str(tmp_path)) for mix in mixes]
    for mix, ranks in zip(mixes, by_plan(2, plans), strict=True):
        for found in ranks:
            check_tiers(stage, mix, found)


def check_tiers(stage: int, mix: str, found: Found) -> None:
    share = PSI // 2
    param, state = home(*SHARES[mix][:2]), home(*SHARES[mix][2:])
    gradient = "device" if state == "device" else "host"
    tiers = found["by_tier"]

    def held(tier: str, kind: str) -> int:
        return int(tiers.get(tier, {}).get(kind, 0))

    resident = stage < 3 and param == "device"
    assert held(param, "parameters") == (2 * PSI if resident else 2 * share)
    assert held(state, "masters") == 4 * share
    row = [str(DEPTH), *size_text(held(param, "parameters")).split(), param, "bfloat16"]
    row += ["resident" if resident else "gathered", state, "float32", state, gradient, "bfloat16", "0"]
    titles, only, total = found["described"]  # the layers have equal placements, and "0" is the first
    assert only.split() == row and titles.startswith("chunks") and total.split() == [*row[:3], "total"]
    assert 8 * share < held(state, "optimizer state") <= 8 * share + PIECES
    if stage == 1:
        # Unsharded gradients stay on the device, and the update reads its part of them there.
        assert (held("device", "gradients"), held("host", "gradients")) == (2 * PSI, 0)
    elif gradient == "host":
        assert held("host", "gradients") == 2 * share
    else:
        assert held("host", "gradients") == 0
        assert held("device", "gradients") >= 2 * share
    for kind, where in (("parameters", param), ("masters", state), ("optimizer state", state)):
        assert sum(held(tier, kind) for tier in ("device", "host", "disk") if tier != where) == 0, (kind, tiers)
    assert found["total"] == sum(sum(kinds.values()) for kinds in tiers.values())
    assert not held("disk", "gradients") and not held("disk", "gathered parameters")


def test_memory_equals_the_report(tmp_path: Path) -> None:
    """On one rank, without mapped memory, live storages are the bytes on device and host and the disk's buffers."""
    mixes = [mix for mix in SHARES if mix not in ("device", "thirds")]
    # One task each: garbage that a session leaves would be counted with the next.
    plain, *others = (by_plan(1, [plan_of(3, mix, str(tmp_path))])[0][0] for mix in ("device", *mixes))
    for mix, found in zip(mixes, others, strict=True):
        check_memory(mix, plain, found)


def check_memory(mix: str, plain: Found, found: Found) -> None:
    beyond = []
    for each in (plain, found):
        in_memory = sum(sum(each["after"].get(tier, {}).values()) for tier in ("device", "host"))
        beyond.append(each["live"] - in_memory - each["buffers"])
    assert 0 <= beyond[0] <= 2 * PSI + 4096
    # Three buffers of each kind (masters, moments, shards), each with up to 4096 bytes for alignment.
    kinds = 2 * (SHARES[mix][3] == 1) + (SHARES[mix][1] == 1)
    assert 0 <= beyond[1] - beyond[0] <= 3 * kinds * 4096 + 2048, (mix, beyond)
    if SHARES[mix][3] == 1:
        # Twice, for the previous version and the one being written, each rounded up.
        tile = pages(4 * UNIT) + pages(8 * UNIT)
        shard = pages(2 * UNIT) if SHARES[mix][1] == 1 else 0
        assert found["on_disk"] == 2 * DEPTH * (tile + shard)
        # On one rank the tile is the full unit: no other state is in memory.
        assert "masters" not in found["by_tier"].get("host", {}) and "masters" not in found["by_tier"]["device"]


@pytest.mark.parametrize(
    ("shared", "update"), [(False, "backward"), *full((None, "step")), *campaign((None, "backward"), (False, "step"))]
)
def test_disk_traffic_and_wire_traffic(shared: bool | None, update: str, tmp_path: Path) -> None:
    share = UNIT // 2
    masters, moments, shard = pages(4 * share), pages(2 * 4 * share), pages(2 * share)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    changes: dict[str, Any] = {"shared_memory": shared, "update": update}
    on_disk = {"s_disk": (0, 1), "p_disk": (1, 0), "p_disk_s_host": (1, 0), "all_disk": (1, 1)}
    plans = [plan_of(3, mix, str(tmp_path)).but(**changes) for mix in ("device", *on_disk)]
    plain, *others = by_plan(2, plans)
    assert plain[0]["traffic"][0]["disk_read"] == 0
    for (mix, (params, state)), runs in zip(on_disk.items(), others, strict=True):
        for run, other in zip(runs, plain, strict=True):
            for step, (found, wire) in enumerate(zip(run["traffic"], other["traffic"], strict=True)):
                assert {kind: found[kind] for kind in kinds} == {kind: wire[kind] for kind in kinds}
                gathers, rest = divmod(found["all_gather"], 2 * share)
                assert rest == 0 and gathers >= DEPTH
                read = params * shard * gathers + state * DEPTH * (masters + (moments if step else 0))
                written = params * shard * DEPTH + state * DEPTH * (masters + moments)
                assert (found["disk_read"], found["disk_write"]) == (read, written), (mix, step, found)


KNOB_WIDTH, KNOB_DEPTH = 96, 4
TILE = 2048


def _buffers(store: DiskStore, nbytes: int) -> int:
    """Return how many buffers of exactly that size there are."""
    return sum(buffer.numel() == nbytes for _, buffer in store._buffers._buffers)


def buffers(plan: Plan) -> list[int]:
    """Return, after steps, the numbers of buffers for values, for the state of tiles, and for shards."""
    model = nn.Sequential(*[nn.Linear(KNOB_WIDTH, KNOB_WIDTH) for _ in range(KNOB_DEPTH)])
    with small_tiles(TILE), sharded(model, torch.optim.AdamW(model.parameters()), plan) as session:
        for _ in range(3):
            session.backward(session.module(torch.ones(2, KNOB_WIDTH)).square().mean())
            session.optimizer.step()
        sizes = 4 * TILE, 2 * 4 * TILE + 4096, 4 * (KNOB_WIDTH * KNOB_WIDTH + KNOB_WIDTH)
        return [_buffers(session._engine.shards.storage.store, pages(size)) for size in sizes]


def buffers_with(directory: Path, **knobs: Any) -> list[int]:
    return run_ranks(1, buffers, with_tiers(zero(3).but(prefetch=0), "all_disk", str(directory), **knobs))[0]


@pytest.mark.parametrize(("state", "param"), [(2, 5), *full((1, 2), (6, 3))])
def test_buffer_counts(state: int, param: int, tmp_path: Path) -> None:
    """Values and tile state have the configured number of buffers, and so have shards, but at least two."""
    assert buffers_with(tmp_path, state_buffers=state, param_buffers=param) == [state, state, param]
    assert buffers_with(tmp_path, param_buffers=1)[2] == 2
