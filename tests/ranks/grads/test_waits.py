"""Nothing inside backward waits for a peer without end: patience may end anywhere, and nothing but time is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from wait_setup import WAYS, Impatient, Watch, loss_at, make_ways, quick_patience

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import assert_close, run_ranks
from tests.support.early_setup import full_state
from tests.support.engine_setup import adam, one_mesh, plain_steps
from tests.support.sets import campaign, full
from tests.support.tier_setup import SHARES, small_tiles, with_tiers

UPDATES: dict[str, dict[str, Any]] = {"step": {"update": "step"}, "in_place": {"update": "backward"}}


@dataclass
class Run:
    """What one rank saw; ``ways`` by step, so that the run can be repeated."""

    ways: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    waited_for: list[str] = field(default_factory=list)
    fired: int = 0
    end: str = ""
    parameters: dict[str, Tensor] = field(default_factory=dict)


def run(plan: Plan, mesh: Mesh, whole: bool, ways: list[str] | None = None) -> Run:
    """Steps in which patience ends at each place of each rank's backward in turn; or just such ``ways``.

    With ``whole`` it ends at each place once, and once from there on; otherwise in turn, and not where ranks leave out
    layers.
    """
    seen, model = Run(), make_ways()
    session = build(model, adam(model, lr=0.01), plan, mesh)
    own = session.optimizer
    impatient, watch = Impatient(session.engine.grads.reducer), Watch(session)

    def step(way: str, at: int | None, rest: bool) -> int:
        impatient.arm(at, rest)
        loss = loss_at(session.module, mesh.rank, len(seen.ways), way)
        session.backward(loss)
        own.step()
        seen.ways.append(way)
        seen.losses.append(float(loss.detach()))
        seen.fired += impatient.fired
        return impatient.fired

    with watch.installed():
        if ways is not None:
            for way in ways:
                step(way, None, False)
        else:
            for way in WAYS if whole else WAYS[:2]:
                for who in range(mesh.size):
                    for at in count():
                        rests = (False, True) if whole else (at % 2 == 0,)
                        fired = [step(way, at if mesh.rank == who else None, rest) for rest in rests]
                        if not any(post[0] for post in mesh.world.exchange([float(max(fired))])):
                            break
    seen.waited_for = watch.seen
    seen.end, seen.parameters = full_state(session), session.module.state_dict()
    session.close()
    return seen


def runs(plans: list[Plan], whole: bool) -> list[tuple[Run, Run]]:
    """For each plan, with patience that ends everywhere and without. All plans have the transport of the first."""
    with quick_patience(), small_tiles(), one_mesh(plans[0]) as mesh:
        found = []
        for plan in plans:
            disturbed = run(plan, mesh, whole)
            found.append((disturbed, run(plan, mesh, whole, disturbed.ways)))
        return found


def plain(ways: list[str], size: int) -> dict[str, Tensor]:
    model = make_ways()
    loss = lambda model, rank, step: loss_at(model, rank, step, ways[step])  # noqa: E731
    return plain_steps(model, adam(model, lr=0.01), len(ways), loss, size)


Case = tuple[int, str, str]
"""Stage, mix of tiers, kind of update."""

SHARED: list[Case] = [
    (3, "p_disk", "step"),
    (3, "all_disk", "in_place"),
    (3, "thirds", "step"),
    (3, "p_host_s_disk", "in_place"),
    (3, "device", "in_place"),
    (2, "s_disk", "in_place"),
]
GLOO: list[Case] = [(3, "all_disk", "step"), (3, "device", "in_place"), (2, "s_host", "in_place")]
MIXES = tuple(SHARES)
EVERYTHING: list[Case] = [(stage, mix, update) for stage in (2, 3) for mix in MIXES for update in UPDATES]
TRANSPORTS = pytest.mark.parametrize("shared", [None, False], ids=["shared", "gloo"])


def check(
    cases: list[Case], size: int, shared: bool | None, directory: Path, *, whole: bool, replicas: int = 1
) -> None:
    plans = []
    for stage, mix, update in cases:
        plan = zero(stage, dp_replicate=replicas).but(shared_memory=shared, exchange_bytes=0, same_order=False)
        plan = plan.but(**UPDATES[update])  # type: ignore[arg-type]
        plans.append(with_tiers(plan, mix, str(directory)))
    ranks = run_ranks(size, runs, plans, whole, timeout=60.0 * len(plans) if whole else 60.0)
    for index, case in enumerate(cases):
        pairs = [found[index] for found in ranks]
        for rank, (disturbed, undisturbed) in enumerate(pairs):
            where = f"{case} on rank {rank} of {size}"
            assert disturbed.fired > 8, f"{where}: patience ended {disturbed.fired} times"
            assert undisturbed.fired == 0
            assert disturbed.losses == undisturbed.losses, where
            assert disturbed.end == undisturbed.end, where
            assert disturbed.waited_for == undisturbed.waited_for == [], where
        first = pairs[0][0]
        assert_close(first.parameters, plain(first.ways, size), 1e-8, str(case))
        for disturbed, _ in pairs:
            assert all(torch.equal(value, first.parameters[name]) for name, value in disturbed.parameters.items())


FEW: list[Case] = [(2, "s_disk", "in_place"), (3, "all_disk", "step")]
"""Each stage and transport, two kinds of update, and some of the tiers."""


@pytest.mark.parametrize(
    ("shared", "cases"),
    [
        pytest.param(None, FEW[:1], id="shared"),
        pytest.param(False, FEW[1:], id="gloo"),
        *campaign(pytest.param(None, [case for case in SHARED if case not in FEW], id="shared-more")),
        *full(pytest.param(False, [case for case in GLOO if case not in FEW], id="gloo-more")),
    ],
)
def test_patience_may_end_at_any_place(shared: bool | None, cases: list[Case], tmp_path: Path) -> None:
    check(cases, 2, shared, tmp_path, whole=False)


@pytest.mark.campaign
@TRANSPORTS
@pytest.mark.parametrize("size", [2, 3, 4])
def test_everywhere(size: int, shared: bool | None, tmp_path: Path) -> None:
    check(EVERYTHING, size, shared, tmp_path, whole=True)
