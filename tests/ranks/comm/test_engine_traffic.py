"""Bytes on the wire per step, to the byte, against formulas written out here.

With N ranks, an operation on a whole array of B bytes sends (N-1)/N B from every rank; an all-reduce sends twice that.
Psi is the padded bytes of the trainable chunks. Padding: fewer than N * R elements a chunk, and fewer than 64 bytes in
front of each matrix. What the ranks tell each other besides (which parameters were used, norms) is counted as
``exchange`` and bounded separately.

What stage 3 gathers in a step with a chain of K equal units, a budget of b units and a prefetch of p:
* forward gathers each unit once, K;
* backward reads the weights of the last r units, in reverse: r = K where the model's input needs a gradient, else
  K - 1, since the first layer's weight is only needed for that;
* what is still there at the turn is not gathered again: the last max(1, b) units, or max(1 + p, b) once the order is
  known (from the second step on), since units that are about to be used are not evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, meshes, sharded
from tests.support.sets import full

WIDTH, DEPTH = 17, 5
UNIT = WIDTH * WIDTH + WIDTH
Case = tuple[Plan, dict[str, Any]]
"""A plan, and the settings of :func:`count`."""


@dataclass(frozen=True)
class Counted:
    """One rank's steps: traffic by kind, and the padded sizes of the chunks in elements."""

    steps: list[dict[str, int]]
    trainable: list[int]
    frozen: list[int]
    peak_gathered: int


def chain(freeze: int = 0) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    model[:freeze].requires_grad_(False)
    return model


def count(
    plan: Plan,
    steps: int = 2,
    passes: int = 1,
    no_sync: bool = False,
    input_grad: bool = True,
    freeze: int = 0,
    mesh: Mesh | None = None,
) -> Counted:
    model = chain(freeze)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    with sharded(model, optimizer, plan, mesh) as session:
        traffic = []
        for _ in range(steps):
            session.reset_traffic()
            for index in range(passes):
                loss = session.module(torch.randn(3, WIDTH, requires_grad=input_grad)).square().mean()
                if no_sync and index + 1 < passes:
                    with session.no_sync():
                        before = session.traffic()
                        session.backward(loss)
                        assert session.traffic() == before
                else:
                    session.backward(loss)
            session.optimizer.step()
            traffic.append(session.traffic())
        chunks = session.engine.shards.layout.chunks
        trainable = [c.padded_numel for c in chunks if c.trainable]
        frozen = [c.padded_numel for c in chunks if not c.trainable]
        return Counted(traffic, trainable, frozen, session.memory().peak_gathered_bytes)


def count_all(cases: list[Case]) -> list[Counted]:
    with meshes() as mesh_of:
        return [count(plan, mesh=mesh_of(plan), **settings) for plan, settings in cases]


def counts(world_size: int, cases: list[Case]) -> list[Counted]:
    """All ranks send the same; padding is within what the file's head states."""
    results = run_ranks(world_size, count_all, cases)
    for result in results:
        assert result == results[0]
    for (_, settings), counted in zip(cases, results[0], strict=True):
        # Two messages a unit and pass, and a few a step, of at most 64 numbers each.
        messages = int(settings.get("passes", 1)) * (2 * DEPTH + 8) + 8
        for step in counted.steps:
            assert step["broadcast"] == 0 and step["exchange"] <= 64 * 8 * (world_size - 1) * messages
        padded = counted.trainable + counted.frozen
        assert UNIT * DEPTH <= sum(padded) < (UNIT + 16) * DEPTH + len(padded) * world_size
    return results[0]


def sends(numel: int, itemsize: int, ranks: int) -> int:
    assert numel % ranks == 0
    return (ranks - 1) * (numel // ranks) * itemsize


def check_step(step: dict[str, int], gathered: int, scattered: int, reduced: int = 0) -> None:
    found = (step["all_gather"], step["reduce_scatter"], step["all_reduce"])
    assert found == (gathered, scattered, reduced)


campaign = pytest.mark.campaign


@pytest.mark.parametrize(
    ("world_size", "shared"),
    [
        pytest.param(2, None, id="2-shared"),
        *full(pytest.param(3, False, id="3-gloo"), pytest.param(4, None, id="4-shared")),
        pytest.param(2, False, id="2-gloo", marks=campaign),
        pytest.param(3, None, id="3-shared", marks=campaign),
        pytest.param(4, False, id="4-gloo", marks=campaign),
    ],
)
def test_two_psi(world_size: int, shared: bool | None) -> None:
    """DDP, ZeRO-1 and ZeRO-2: 2 Psi (N-1)/N."""
    stages = ("ddp", "zero1", "zero2")
    results = counts(world_size, [(PLANS[stage].but(shared_memory=shared), {}) for stage in stages])
    for stage, result in zip(stages, results, strict=True):
        psi = sends(sum(result.trainable), 4, world_size)
        for step in result.steps:
            check_step(step, *((0, 0, 2 * psi) if stage == "ddp" else (psi, psi)))


def kept_units(budget_units: int, prefetch: int, known: bool) -> int:
    return max(1 + prefetch if known else 1, budget_units)


def test_budgets_fall_from_three_psi_to_two() -> None:
    per_step = []
    budgets = [(units, prefetch) for units in range(DEPTH + 1) for prefetch in (0, 1)]
    plans = [zero(3).but(gathered_fraction=units / DEPTH, prefetch=prefetch) for units, prefetch in budgets]
    for (units, prefetch), result in zip(budgets, counts(2, [(plan, {}) for plan in plans]), strict=True):
        unit = sends(result.trainable[0], 4, 2)
        again = max(DEPTH - kept_units(units, prefetch, known=True), 0)
        # A budget of everything is ZeRO-2: one gather, right after the update.
        check_step(result.steps[1], unit * (DEPTH + again), unit * DEPTH)
        whole = result.trainable[0] * 4
        if units < DEPTH:
            assert result.peak_gathered == whole * kept_units(units, prefetch, known=True)
        else:
            assert result.peak_gathered == 0  # resident, not gathered
        if prefetch == 1:
            per_step.append(result.steps[1]["all_gather"])
    assert per_step == sorted(per_step, reverse=True) and per_step[0] > per_step[-1]


@pytest.mark.parametrize(
    ("shared", "stages"),
    [
        pytest.param(None, (1, 2, 3), id="shared"),
        *full(pytest.param(False, (3,), id="gloo")),
        pytest.param(False, (1, 2), id="gloo-stages-1-2", marks=campaign),
    ],
)
def test_hybrid_shard(shared: bool | None, stages: tuple[int, ...]) -> None:
    """Reduce-scatter over the shard group, then all-reduce of the shard over the replicas."""
    plans = [zero(stage, dp_replicate=2).but(shared_memory=shared, prefetch=0) for stage in stages]
    for stage, result in zip(stages, counts(4, [(plan, {}) for plan in plans]), strict=True):
        psi = sends(sum(result.trainable), 4, 2)
        replicas = 2 * sends(sum(result.trainable) // 2, 4, 2)
        gathered = psi + psi * (DEPTH - 1) // DEPTH if stage == 3 else psi
        for step in result.steps:
            check_step(step, gathered, psi, replicas)


@pytest.mark.parametrize("shared", [None, *full(False)], ids=["shared", "gloo"])
def test_micro_batches_and_no_sync(shared: bool | None) -> None:
    passes = 3
    replicated_once = [(name, no_sync) for name in ("ddp", "zero1") for no_sync in (True, False)]
    cases: list[Case] = [(PLANS[name], {"passes": passes, "no_sync": no_sync}) for name, no_sync in replicated_once]
    cases += [(PLANS["zero2"], {"passes": passes}), (PLANS["zero3"].but(prefetch=0), {"passes": passes})]
    *results, zero2, zero3 = counts(2, [(plan.but(shared_memory=shared), settings) for plan, settings in cases])
    for (name, no_sync), result in zip(replicated_once, results, strict=True):
        psi = sends(sum(result.trainable), 4, 2)
        reductions = 1 if no_sync else passes
        for step in result.steps:
            check_step(step, *((0, 0, 2 * psi * reductions) if name == "ddp" else (psi, psi * reductions)))
    psi = sends(sum(zero2.trainable), 4, 2)
    for step in zero2.steps:
        check_step(step, psi, psi * passes)
    unit = sends(zero3.trainable[0], 4, 2)
    # Backward ends with the first unit in place, where the next forward begins.
    gathers = passes * (2 * DEPTH - 1) - (passes - 1)
    for step in zero3.steps:
        check_step(step, unit * gathers, unit * DEPTH * passes)


def test_frozen_parameters_cost_nothing() -> None:
    """At stages 1 and 2 nothing at all; at stage 3 they are gathered but not reduced, and stay valid over the step."""
    names = ("ddp", "zero1", "zero2")
    settings = {"freeze": 2, "input_grad": False}
    plans = [*(PLANS[name] for name in names), zero(3).but(prefetch=0)]
    *results, zero3 = counts(2, [(plan, settings) for plan in plans])
    for name, result in zip(names, results, strict=True):
        assert sum(result.frozen) >= 2 * UNIT
        psi = sends(sum(result.trainable), 4, 2)
        for step in result.steps:
            check_step(step, *((0, 0, 2 * psi) if name == "ddp" else (psi, psi)))
    unit = sends(zero3.trainable[0], 4, 2)
    # Backward reads the weights of the trainable units but the first of them; the last one is still there.
    for step in zero3.steps:
        check_step(step, unit * (DEPTH + (DEPTH - 2 - 1) - 1), unit * (DEPTH - 2))


def unused_block(plan: Plan) -> tuple[dict[str, int], int]:
    model = chain()
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), plan) as session:
        session.reset_traffic()
        session.backward(model[:2](torch.randn(3, WIDTH)).square().mean())
        session.optimizer.step()
        return session.traffic(), session.engine.shards.layout.chunks[0].padded_numel


def test_gradients_of_unused_units_are_not_sent() -> None:
    for traffic, padded in run_ranks(2, unused_block, zero(3)):
        assert traffic["reduce_scatter"] == 2 * sends(padded, 4, 2)


FIRST, END = "backward of the first layer", "end of the pass"
