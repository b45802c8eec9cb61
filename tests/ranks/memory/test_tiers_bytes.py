"""Bytes by tier and kind, and to and from the disk, against formulas written out here.

Psi parameters in bf16 with fp32 masters and Adam on N ranks, in K equal units that N divides: parameters 2 Psi / N (at
stages 1 and 2, 2 Psi on the device), masters 4 Psi / N, moments 8 Psi / N and a step count of 4 bytes a piece,
gradients 2 Psi / N with the state, but on the host where that is on a disk; exchange buffers on the device.

A record of B bytes moves ``pages(B)``, B rounded up to 4096. In a step with everything on the disk and one tile a unit:
read: every gather the shard; once the masters and (from the second step on) the moments;
written: once the shard, the masters and the moments. Also with updates during backward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.base.sizes import size_text
from shardwise.core.mesh import Mesh
from shardwise.plan import ByModule, Plan, zero
from shardwise.testing import run_ranks
from tests.support.counters import live_tensor_bytes
from tests.support.engine_setup import one_mesh, sharded
from tests.support.sets import full
from tests.support.tier_setup import SHARES, with_tiers

WIDTH, DEPTH = 64, 4
UNIT = WIDTH * WIDTH + WIDTH
PSI = UNIT * DEPTH
PIECES = 2 * 4 * 2 * DEPTH  # at most: a weight and a bias, cut between two ranks, 4 bytes each


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
        store = session.engine.shards.storage.store
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
    """On a rank: each plan in turn, in one mesh."""
    with one_mesh(plans[0]) as mesh:
        return [measure(plan, mesh, steps) for plan in plans]


def by_plan(ranks: int, plans: list[Plan], steps: int = 2) -> list[list[Found]]:
    """What each rank found, by plan."""
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
        # Whole gradients are kept on the device, and the update reads its part of them there.
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


def test_shares_are_met_to_the_nearest_chunk(tmp_path: Path) -> None:
    """A quarter of K = 4 equal chunks each."""
    plan = plan_of(3, "device", "")
    plan = plan.but(tiers=with_tiers(plan, "all_disk", str(tmp_path)).tiers)
    plan = plan.but(param_host_fraction=0.25, param_disk_fraction=0.25)
    plan = plan.but(state_host_fraction=0.5, state_disk_fraction=0.25)
    unit = UNIT // 2
    for found in by_plan(2, [plan])[0]:
        tiers = found["by_tier"]
        assert [tiers[t]["parameters"] for t in ("device", "host", "disk")] == [4 * unit, 2 * unit, 2 * unit]
        assert [tiers[t]["masters"] for t in ("device", "host", "disk")] == [4 * unit, 8 * unit, 4 * unit]


def test_memory_is_what_the_report_says(tmp_path: Path) -> None:
    """One rank, nothing mapped: live storages are what is on device and host, and the disk's buffers."""
    mixes = [mix for mix in SHARES if mix not in ("device", "thirds")]
    # A task each: what a session leaves to the collector would be counted with the next.
    plain, *others = (by_plan(1, [plan_of(3, mix, str(tmp_path))])[0][0] for mix in ("device", *mixes))
    for mix, found in zip(mixes, others, strict=True):
        check_memory(mix, plain, found)


def check_memory(mix: str, plain: Found, found: Found) -> None:
    beyond = []
    for each in (plain, found):
        in_memory = sum(sum(each["after"].get(tier, {}).values()) for tier in ("device", "host"))
        beyond.append(each["live"] - in_memory - each["buffers"])
    assert 0 <= beyond[0] <= 2 * PSI + 4096
    # Three buffers of each kind (masters, moments, shards), each with up to 4096 bytes to be aligned by.
    kinds = 2 * (SHARES[mix][3] == 1) + (SHARES[mix][1] == 1)
    assert 0 <= beyond[1] - beyond[0] <= 3 * kinds * 4096 + 2048, (mix, beyond)
    if SHARES[mix][3] == 1:
        # Twice, for the version before and the one being written, each rounded up.
        tile = pages(4 * UNIT) + pages(8 * UNIT)
        shard = pages(2 * UNIT) if SHARES[mix][1] == 1 else 0
        assert found["on_disk"] == 2 * DEPTH * (tile + shard)
        # With one rank the tile is the whole unit: nothing else of the state is in memory.
        assert "masters" not in found["by_tier"].get("host", {}) and "masters" not in found["by_tier"]["device"]


@pytest.mark.parametrize(
    ("shared", "update"),
    [
        pytest.param(None, "step", id="shared-step", marks=pytest.mark.full),
        pytest.param(None, "backward", id="shared-backward", marks=pytest.mark.campaign),
        pytest.param(False, "step", id="gloo-step", marks=pytest.mark.campaign),
        pytest.param(False, "backward", id="gloo-backward"),
    ],
)
def test_disk_traffic_and_wire_traffic(shared: bool | None, update: str, tmp_path: Path) -> None:
    share = UNIT // 2
    masters, moments, shard = pages(4 * share), pages(2 * 4 * share), pages(2 * share)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    changes: dict[str, Any] = {"shared_memory": shared, "update": update}
    on_disk = {"s_disk": (0, 1), "p_disk": (1, 0), "p_disk_s_host": (1, 0), "all_disk": (1, 1)}
    plans = [plan_of(3, mix, str(tmp_path)).but(**changes) for mix in ("device", *on_disk)]
    plain, *others = by_plan(2, plans)
    assert "disk_read" not in plain[0]["traffic"][0]
    for (mix, (params, state)), runs in zip(on_disk.items(), others, strict=True):
        for run, other in zip(runs, plain, strict=True):
            for step, (found, wire) in enumerate(zip(run["traffic"], other["traffic"], strict=True)):
                assert {kind: found[kind] for kind in kinds} == {kind: wire[kind] for kind in kinds}
                gathers, rest = divmod(found["all_gather"], 2 * share)
                assert rest == 0 and gathers >= DEPTH
                read = params * shard * gathers + state * DEPTH * (masters + (moments if step else 0))
                written = params * shard * DEPTH + state * DEPTH * (masters + moments)
                assert (found["disk_read"], found["disk_write"]) == (read, written), (mix, step, found)
