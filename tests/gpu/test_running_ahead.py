"""The host queues a step's work while the GPU is still at an earlier one: memory and numbers are as if it waited."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gpu.on_device import Stack, adamw, device_of_rank
from gpu.test_tiers import SLACK, tiered
from shardwise.plan import Plan, zero
from shardwise.session import build
from shardwise.testing import RankPool

WIDTH, DEPTH = 2048, 16
LAYER = 2 * WIDTH * WIDTH  # bf16
CYCLES = 400_000_000
"""About 0.2 s of the GPU, in which the host goes through a whole forward pass and most of backward."""


@dataclass
class Ahead:
    """Bytes of the steps after the first two: by the allocator, and by the ledger. Losses of all."""

    allocated: int
    ledger: int
    losses: list[float]


def train(plan: Plan, lagging: bool) -> Ahead:
    """bf16 layers of 8 MiB. With ``lagging`` the GPU sleeps at the beginning of each step."""
    device = device_of_rank("cuda")
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated(device)
    model = Stack(WIDTH, DEPTH)
    session = build(model, adamw(model), plan, device=device)
    highest, losses = 0, []
    for index in range(5):
        rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
        if index == 2:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        if lagging:
            torch.cuda._sleep(CYCLES)
        loss = session.module(rows).float().square().mean()
        session.backward(loss)
        # The engine may start the allocator's peak anew while it traces, so it is read after each pass.
        highest = max(highest, torch.cuda.max_memory_allocated(device) - before) if index >= 2 else 0
        session.optimizer.step()
        losses.append(float(loss.detach()))
        del loss
    found = Ahead(highest, session.ledger.peak_bytes, losses)
    session.close()
    session.mesh.close()
    return found


PLANS = {
    "state_host": ((0.0, 0.0), (1.0, 0.0), DEPTH + 8),
    "all_host": ((1.0, 0.0), (1.0, 0.0), 10),
    "half": ((0.5, 0.0), (1.0, 0.0), DEPTH // 2 + 10),
}
"""Shares of parameters and of state on the host and on disk, and the layers that the device may hold."""


@pytest.mark.gpus(1)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("where", PLANS)
def test_a_declared_capacity_holds_while_the_host_is_ahead(one_rank: RankPool, where: str, update: str) -> None:
    """What another stream has used may not be kept until the GPU has come there: the accounts do not see it."""
    params, state, layers = PLANS[where]
    capacity = layers * LAYER + SLACK
    plan = tiered(zero(3, torch.bfloat16), params, state, None)
    plan = plan.but(device_capacity_bytes=capacity, prefetch=2, update=update)
    (ahead,), (waiting,) = (one_rank.run(train, plan, lagging, timeout=240.0) for lagging in (True, False))
    assert ahead.losses == waiting.losses and ahead.losses[-1] == ahead.losses[-1]
    assert ahead.ledger <= capacity
    assert ahead.allocated <= capacity + SLACK
    assert ahead.allocated <= ahead.ledger + SLACK, "the allocator knows of bytes that no account has"
    assert ahead.allocated <= waiting.allocated + SLACK


@pytest.mark.gpus(1)
def test_without_a_capacity_running_ahead_takes_no_more(one_rank: RankPool) -> None:
    plan = tiered(zero(3, torch.bfloat16), (1.0, 0.0), (1.0, 0.0), None).but(prefetch=2)
    (ahead,), (waiting,) = (one_rank.run(train, plan, lagging, timeout=240.0) for lagging in (True, False))
    assert ahead.losses == waiting.losses
    assert 0 < ahead.allocated <= waiting.allocated + SLACK
