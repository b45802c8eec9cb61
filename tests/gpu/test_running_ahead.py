"""Tests of a host that queues work while the GPU is late: memory and losses are the same as if the host waited."""

import pytest
import torch

from gpu.on_device import Bytes, measure_memory
from gpu.test_tiers import SLACK, tiered
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool

WIDTH, DEPTH = 2048, 16
LAYER = 2 * WIDTH * WIDTH  # bf16
CYCLES = 400_000_000
"""About 0.2 s on the GPU, in which the host queues the forward pass and most of backward."""


def measured(plan: Plan, lag_cycles: int) -> Bytes:
    """Measure bf16 layers of 8 MiB."""
    return measure_memory(plan, WIDTH, DEPTH, 5, (2,), lag_cycles)


PLANS = {
    "state_host": ((0.0, 0.0), (1.0, 0.0), DEPTH + 8),
    "all_host": ((1.0, 0.0), (1.0, 0.0), 10),
    "half": ((0.5, 0.0), (1.0, 0.0), DEPTH // 2 + 10),
}
"""Fractions (host, disk) of parameters and of state, and the number of layers that fit on the device."""


@pytest.mark.gpus(1)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("where", PLANS)
def test_capacity_is_respected_while_the_host_is_ahead(one_rank: RankPool, where: str, update: str) -> None:
    """Memory used on a side stream must not be kept until the GPU is done, since the accounts do not include it."""
    params, state, layers = PLANS[where]
    capacity = layers * LAYER + SLACK
    plan = tiered(zero(3, torch.bfloat16), params, state, None)
    plan = plan.but(device_capacity_bytes=capacity, prefetch=2, update=update)
    (ahead,), (waiting,) = (one_rank.run(measured, plan, lag, timeout=240.0) for lag in (CYCLES, 0))
    assert ahead.losses == waiting.losses and ahead.losses[-1] == ahead.losses[-1]
    assert ahead.in_step <= waiting.in_step + SLACK
    assert waiting.after_step <= waiting.reported + SLACK
    for found in (ahead, waiting):
        assert found.ledger <= capacity
        assert found.in_step <= capacity + SLACK
        assert found.in_step <= found.ledger + SLACK, "the allocator knows of bytes that no account has"
        # Two moments and masters in fp32, and the parameters on the host.
        assert found.on_host >= (6 + params[0]) * DEPTH * LAYER * 0.9


@pytest.mark.gpus(1)
def test_running_ahead_needs_no_more_memory(one_rank: RankPool) -> None:
    plan = tiered(zero(3, torch.bfloat16), (1.0, 0.0), (1.0, 0.0), None).but(prefetch=2)
    (ahead,), (waiting,) = (one_rank.run(measured, plan, lag, timeout=240.0) for lag in (CYCLES, 0))
    assert ahead.losses == waiting.losses
    assert 0 < ahead.in_step <= waiting.in_step + SLACK
