"""The engine's memory meter: what a step holds besides model data, and what room that leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.shards.meter import MemoryMeter
from shardwise.plan import AutoPlan, TierPlan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks

WIDTH, ROWS, DEPTH = 16, 4, 5
UNIT = 4 * (WIDTH * WIDTH + WIDTH)
ACTIVATION = 4 * WIDTH * ROWS


class Chain(nn.Module):
    """Each block saves its output only: ``tanh(linear(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tiers(capacity: int, warmup: float = 0.5, steady: float = 0.9, margin: float = 0.0) -> TierPlan:
    ratios = AutoPlan(warmup_non_model_ratio=warmup, steady_capacity_ratio=steady, margin_ratio=margin)
    return dataclasses.replace(on_device(), device_capacity_bytes=capacity, auto=ratios)


@contextmanager
def chain(plan: TierPlan) -> Iterator[tuple[Session, MemoryMeter]]:
    torch.manual_seed(0)
    model = Chain()
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(3).but(prefetch=0, tiers=plan))
    meter = session.engine.meter
    assert meter is not None
    yield session, meter
    session.close()
    session.mesh.close()


def step(session: Session, rows: int = ROWS) -> None:
    session.backward(session.module(torch.ones(rows, WIDTH)).sum())
    session.optimizers[0].step()


def trace() -> tuple[MemStats, list[int], int]:
    with chain(tiers(1 << 20)) as (session, meter):
        assert meter.stats is None and meter.budget_bytes() == (1 << 19) - session.ledger.model_bytes()
        assert meter.margin_bytes() == 0
        step(session)
        assert meter.stats is not None
        return meter.stats, list(session.engine.pool.training.recorded), meter.budget_bytes()


def test_the_trace_of_a_chain() -> None:
    stats, order, _ = run_ranks(1, trace)[0]
    assert order == [0, 1, 2, 3, 4, 3, 2, 1, 0][: len(order)] and stats.matches(order)
    forward = stats.interval_bytes[: DEPTH - 1]
    # Between one use and the next: the outputs of the blocks so far, and of the linear layer under way.
    assert list(forward) == [(index + 2) * ACTIVATION for index in range(DEPTH - 1)]
    assert all(moment.phase == "forward" for moment in stats.moments[:DEPTH])
    assert stats.moments[-1].phase == "backward"
    assert max(stats.interval_bytes) == stats.peak_non_model_bytes <= (DEPTH + 3) * ACTIVATION + UNIT
    assert stats.gathered_bytes == dict.fromkeys(range(DEPTH), UNIT)


def budgets() -> tuple[list[int], list[int], list[int]]:
    with chain(tiers(1 << 16)) as (session, meter):
        step(session)
        assert meter.stats is not None
        intervals = list(meter.stats.interval_bytes)
        pool, seen, others = session.engine.pool, [], []

        def use(unit: int) -> None:
            if len(seen) < len(pool.trace.current):
                seen.append(meter.budget_bytes())
                others.append(session.ledger.model_bytes() - pool.reusable_bytes)

        session.engine.events.unit_wanted.listen(use)
        step(session)
        return intervals, seen, others


def test_budget_by_position() -> None:
    intervals, seen, others = run_ranks(1, budgets)[0]
    steady = int((1 << 16) * 0.9)
    assert seen == [steady - rest - other for rest, other in zip(intervals, others, strict=True)]
    assert len(set(seen)) > 3


def too_small() -> str:
    with chain(tiers(8 * UNIT, warmup=0.9)) as (session, _):
        step(session)
        with pytest.raises(DeviceMemoryError) as error:
            step(session, rows=200)
        message = str(error.value)
        del error  # with it go the activations that its frames hold
        session.optimizers[0].zero_grad()
        step(session)
        return message


def test_activations_that_do_not_fit() -> None:
    message = run_ranks(1, too_small)[0]
    assert "activations and the rest" in message and "activation checkpointing" in message
