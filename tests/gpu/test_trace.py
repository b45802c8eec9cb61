"""The memory trace against CUDA's allocator."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from gpu.on_device import Stack, adamw, both_passes, device_of_rank, rows_of, session_of
from gpu.test_auto_and_early import highest_allocation
from gpu.test_tiers import LAYER, SLACK, WIDTH, tiered
from shardwise.core.memory.trace.tracing import trace_memory
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool

ROWS, DEPTH = 4096, 8


@dataclass
class Traced:
    """Bytes of one step of a model, by the trace and by the allocator."""

    traced: int
    allocated: int
    parameters: int
    gradients_at_the_end: int
    parameters_said: int
    capacity: int | None
    total_memory: int
    left_over: int
    same: bool


def trace(stepped: bool) -> Traced:
    """A plain model, with or without its optimizer's step. CUDA only."""
    device = device_of_rank("cuda")
    model, rows = Stack(WIDTH, DEPTH).to(device), rows_of(WIDTH, 0, device, ROWS)
    optimizer = adamw(model)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    def step() -> None:
        loss(model, rows).backward()  # type: ignore[no-untyped-call]
        if stepped:
            optimizer.step()

    # Work spaces and optimizer state exist from here on.
    loss(model, rows).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device)
    optimizer.zero_grad()
    before, values = torch.cuda.memory_allocated(device), [p.detach().clone() for p in model.parameters()]
    held = sum(value.nbytes for value in values)
    stats = trace_memory(model, rows, loss, optimizer=optimizer if stepped else None)
    torch.cuda.synchronize(device)
    same = all(torch.equal(p.detach(), value) for p, value in zip(model.parameters(), values, strict=True))
    # The copies just made are part of what the trace saw.
    return Traced(
        traced=stats.peak_bytes - held,
        allocated=allocated,
        parameters=held,
        gradients_at_the_end=stats.moments[-1].kinds.get("gradients", 0),
        parameters_said=stats.moments[0].kinds["parameters"],
        capacity=stats.capacity_bytes,
        total_memory=torch.cuda.mem_get_info(device)[1],
        left_over=torch.cuda.memory_allocated(device) - held - before,
        same=same and all(p.grad is None for p in model.parameters()),
    )


@pytest.mark.gpus(1)
@pytest.mark.parametrize("stepped", [False, True])
def test_the_peak_is_the_allocators(one_rank: RankPool, stepped: bool) -> None:
    (found,) = one_rank.run(trace, stepped, timeout=240.0)
    assert 0.95 * found.allocated <= found.traced <= 1.01 * found.allocated + 2**20
    assert found.traced > found.parameters + ROWS * WIDTH * 4 * DEPTH
    assert found.parameters_said == found.gradients_at_the_end == found.parameters == DEPTH * LAYER
    # What the driver keeps for itself may be in one and not in the other.
    assert found.capacity == pytest.approx(found.total_memory, rel=0.01)
    assert found.same and found.left_over <= 2**20


@dataclass
class Session:
    """Bytes of the steps of a session, by its own trace and by the allocator."""

    traced: int
    allocated: int
    rest: int
    order: tuple[int, ...]


def session_trace(plan: Plan) -> Session:
    """What the first step under ``plan`` said of the second, which has the optimizer's state. CUDA only."""
    device = device_of_rank("cuda")
    torch.cuda.empty_cache()
    base, model = torch.cuda.memory_allocated(device), Stack(WIDTH, DEPTH)
    with session_of(plan, device, model) as session:
        rows = rows_of(WIDTH, 0, device, ROWS)
        both_passes(session, rows)
        session.optimizer.step()
        stats = session.memory_stats()
        assert stats is not None
        with highest_allocation(device) as peak:
            already = torch.cuda.memory_allocated(device) - base
            both_passes(session, rows)
            allocated = already + peak()
        # The trace counts what the process has besides, as the allocator does.
        traced, rest = stats.peak_bytes - base, stats.peak_non_model_bytes
        return Session(traced=traced, allocated=allocated, rest=rest, order=stats.order)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("state", [0.0, 1.0])
def test_the_trace_of_a_session_is_the_allocators(one_rank: RankPool, state: float) -> None:
    """Also where the state is on the device, which the first step only foresees."""
    plan = tiered(zero(3), (1.0, 0.0), (state, 0.0), None).but(device_capacity_bytes=2**32, prefetch=0)
    (found,) = one_rank.run(session_trace, plan, timeout=240.0)
    assert 0.9 * found.allocated <= found.traced <= found.allocated + SLACK
    # What forward keeps for backward: an input of each layer and of each tanh.
    assert found.rest >= ROWS * WIDTH * 4 * DEPTH
    # The last layer stays from forward to backward, and backward needs no weight of the first.
    assert found.order == (*range(DEPTH), *range(DEPTH - 2, 0, -1))
