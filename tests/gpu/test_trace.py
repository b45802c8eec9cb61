"""Tests of the memory trace on a GPU: its peaks match those of CUDA's allocator, for plain models and for sessions."""

import pytest
import torch
from torch import Tensor, nn

from gpu.on_device import Stack, both_passes, device_of_rank, rows_of, session_of
from gpu.test_auto_and_early import highest_allocation
from gpu.test_tiers import LAYER, SLACK, WIDTH, tiered
from shardwise.core.memory.trace.standalone import trace_memory
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool
from tests.support.models import adamw

ROWS, DEPTH = 4096, 8


def check_trace(stepped: bool) -> None:
    """Trace a plain model, with or without the optimizer's step, and compare with the allocator. CUDA only."""
    device = device_of_rank("cuda")
    model, rows = Stack(WIDTH, DEPTH).to(device), rows_of(WIDTH, 0, device, ROWS)
    optimizer = adamw(model)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    def step(updates: bool) -> None:
        loss(model, rows).backward()  # type: ignore[no-untyped-call]
        if updates:
            optimizer.step()

    step(updates=True)  # workspaces and optimizer state exist from here on
    optimizer.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step(stepped)
    torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device)
    optimizer.zero_grad()
    before, values = torch.cuda.memory_allocated(device), [p.detach().clone() for p in model.parameters()]
    held = sum(value.nbytes for value in values)
    stats = trace_memory(model, rows, loss, optimizer=optimizer if stepped else None)
    torch.cuda.synchronize(device)
    traced = stats.peak_bytes - held  # the trace includes the copies made above
    assert 0.95 * allocated <= traced <= 1.01 * allocated + 2**20, (traced, allocated)
    assert traced > held + ROWS * WIDTH * 4 * DEPTH
    at_the_end = stats.moments[-1].kinds.get("gradients", 0)
    assert stats.moments[0].kinds["parameters"] == at_the_end == held == DEPTH * LAYER
    # Only one of the two may include the driver's own memory.
    assert stats.capacity_bytes == pytest.approx(torch.cuda.mem_get_info(device)[1], rel=0.01)
    assert torch.cuda.memory_allocated(device) - held - before <= 2**20
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(param.detach(), value) and param.grad is None


@pytest.mark.gpus(1)
@pytest.mark.parametrize("stepped", [False, True])
def test_traced_peak_matches_the_allocator(one_rank: RankPool, stepped: bool) -> None:
    one_rank.run(check_trace, stepped, timeout=240.0)


def check_session_trace(plan: Plan) -> None:
    """Compare the trace of the first step with the second step, which has optimizer state. CUDA only."""
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
            allocated = torch.cuda.memory_allocated(device) - base
            both_passes(session, rows)
            allocated += peak()
    traced = stats.peak_bytes - base  # other memory of the process is included
    assert 0.9 * allocated <= traced <= allocated + SLACK, (traced, allocated)
    # Forward saves an input of each layer and of each tanh for backward.
    assert stats.peak_non_model_bytes >= ROWS * WIDTH * 4 * DEPTH
    # The last layer stays gathered between forward and backward, and backward does not need the weight of the first.
    assert stats.order == (*range(DEPTH), *range(DEPTH - 2, 0, -1))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("state", [0.0, 1.0])
def test_session_trace_matches_the_allocator(one_rank: RankPool, state: float) -> None:
    """The first step predicts the optimizer state, which may be on the device."""
    plan = tiered(zero(3), (1.0, 0.0), (state, 0.0), None).but(device_capacity_bytes=2**32, prefetch=0)
    one_rank.run(check_session_trace, plan, timeout=240.0)
