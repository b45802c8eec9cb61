"""Tests of the engine's ``MemoryMeter``: the memory trace, the budget for gathered units, and its use of the allocator.

A fake of CUDA's allocator shows allocations between gathers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.trace.tracker import AllocatorTracker
from shardwise.core.shards import memory_meter as meters
from shardwise.core.shards.memory_meter import MemoryMeter
from shardwise.plan import AutoPlan, TierPlan, on_device, zero
from shardwise.session import Session, build
from tests.support.cuda_setup import FakeCuda
from tests.support.on_ranks import on_ranks, raises

WIDTH, ROWS, DEPTH = 16, 4, 5
UNIT = 4 * (WIDTH * WIDTH + WIDTH)
ACTIVATION = 4 * WIDTH * ROWS


def tiers(capacity: int, warmup: float = 0.5) -> TierPlan:
    ratios = AutoPlan(warmup_non_model_ratio=warmup, steady_capacity_ratio=0.9, margin_ratio=0.0)
    return replace(on_device(), device_capacity_bytes=capacity, auto=ratios)


@contextmanager
def chain(plan: TierPlan) -> Iterator[tuple[Session, MemoryMeter]]:
    # Each block saves its output only.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(3).but(prefetch=0, tiers=plan))
    meter = session._engine.meter
    assert meter is not None
    yield session, meter
    session.close()
    session.mesh.close()


def step(session: Session, rows: int = ROWS) -> None:
    session.backward(session.module(torch.ones(rows, WIDTH)).sum())
    session.optimizers[0].step()


@on_ranks(1)
def test_trace_of_a_chain() -> None:
    with chain(tiers(1 << 20)) as (session, meter):
        assert meter.stats is None and meter.budget_bytes() == (1 << 19) - session.ledger.model_bytes()
        assert meter.margin_bytes() == 0
        step(session)
        stats, order = meter.stats, list(session._engine.pool.training.recorded)
    assert stats is not None and order == [0, 1, 2, 3, 4, 3, 2, 1, 0][: len(order)] and stats.matches(order)
    forward = stats.interval_bytes[: DEPTH - 1]
    # Each interval has the outputs of the blocks so far, and of the current linear layer.
    assert list(forward) == [(index + 2) * ACTIVATION for index in range(DEPTH - 1)]
    assert all(moment.phase == "forward" for moment in stats.moments[:DEPTH])
    assert stats.moments[-1].phase == "backward"
    assert max(stats.interval_bytes) == stats.peak_non_model_bytes <= (DEPTH + 3) * ACTIVATION + UNIT
    assert stats.gathered_bytes == dict.fromkeys(range(DEPTH), UNIT)


@on_ranks(1)
def test_budget_by_position() -> None:
    with chain(tiers(1 << 16)) as (session, meter):
        step(session)
        assert meter.stats is not None
        intervals = list(meter.stats.interval_bytes)
        pool, seen, others = session._engine.pool, [], []

        def use(unit: int) -> None:
            if len(seen) < len(pool.trace.current):
                seen.append(meter.budget_bytes())
                others.append(session.ledger.model_bytes() - pool.reusable_bytes)

        session._engine.events.unit_requested.listen(use)
        step(session)
    steady = int((1 << 16) * 0.9)
    assert seen == [steady - rest - other for rest, other in zip(intervals, others, strict=True)]
    assert len(set(seen)) > 3


@on_ranks(1)
def test_activations_above_the_capacity() -> None:
    with chain(tiers(8 * UNIT, warmup=0.9)) as (session, _):
        step(session)
        message = raises(DeviceMemoryError, None, lambda: step(session, rows=200))
        assert "activations and the rest" in message and "activation checkpointing" in message
        session.optimizers[0].zero_grad()
        step(session)


# ---- with a fake allocator

LAYERS, CUDA_WIDTH, STEPS = 12, 8, 4
CAPACITY = 1 << 20


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return a fake GPU allocator with the ledger's bytes and the test's own, for an engine on the CPU."""
    found = FakeCuda(monkeypatch)

    def make(device: torch.device, model_bytes: Callable[[], int]) -> AllocatorTracker:
        found.model = model_bytes
        return AllocatorTracker(device, model_bytes)

    monkeypatch.setattr(meters, "make_tracker", make)
    return found


@pytest.fixture
def session(cuda: FakeCuda) -> Iterator[Session]:
    """Return a session after some ZeRO-3 steps on one rank, with all parameters on the host and a prefetch of one
    unit.
    """
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(CUDA_WIDTH), nn.Linear(CUDA_WIDTH, 8)) for _ in range(LAYERS)))
    plan = zero(3)
    tiers = replace(plan.tiers, param_host_fraction=1.0, device_capacity_bytes=CAPACITY)
    made = build(model, torch.optim.SGD(model.parameters(), lr=0.1), plan.but(tiers=tiers), device=torch.device("cpu"))
    for _ in range(STEPS):
        cuda_step(made)
    yield made
    made.close()
    made.mesh.close()


def cuda_step(session: Session, between: Callable[[], None] = lambda: None) -> None:
    loss = session.module(torch.ones(2, CUDA_WIDTH)).square().mean()
    between()
    session.backward(loss)
    session.optimizer.step()
    session.optimizer.zero_grad()


def test_allocations_between_gathers_evict_units_or_raise(cuda: FakeCuda, session: Session) -> None:
    session._engine.pool.drop_idle()
    block = session.module.unwrap()[LAYERS // 2]
    grown = block.register_forward_hook(lambda *_: cuda.allocate(CAPACITY))
    raises(DeviceMemoryError, "activations and the rest: 1 MiB", lambda: cuda_step(session))
    grown.remove()
    cuda.allocate(-CAPACITY)
    session.module.zero_grad()
    cuda_step(session)


def test_peak_between_gathers_is_detected(cuda: FakeCuda, session: Session) -> None:
    """No gather happens during the burst, so only the allocator's peak shows it."""
    resets = cuda.resets

    def burst(*_: object) -> None:
        cuda.allocate(CAPACITY)
        cuda.allocate(-CAPACITY)

    block = session.module.unwrap()[LAYERS // 2]
    hook = block.register_forward_hook(burst)
    raises(DeviceMemoryError, "In the forward pass, activations and the rest took up to", lambda: cuda_step(session))
    hook.remove()
    assert cuda.resets == resets
    session.module.zero_grad()
    cuda_step(session)  # peaks before this pass are ignored
    assert cuda.resets > resets
    cuda_step(session, between=burst)  # memory between the passes belongs to the program


def test_memory_in_use_by_a_stream_counts(cuda: FakeCuda, session: Session) -> None:
    cuda.allocate(CAPACITY)
    cuda.drop_recorded(CAPACITY)
    raises(DeviceMemoryError, None, lambda: cuda_step(session))
