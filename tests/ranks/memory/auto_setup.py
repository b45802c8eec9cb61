"""What the tests of a declared device capacity share: models, plans, a training loop, and a count of model data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.base.device import live_bytes
from shardwise.core.memory.tier import Tier
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.mesh import Mesh
from shardwise.plan import AutoPlan, Plan, TierPlan, on_device, zero
from shardwise.session import Session
from tests.support.engine_setup import sharded
from tests.support.tier_setup import digest

WIDTH = 32


class Block(nn.Module):
    """``[rows, 32]``, 8.3 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks in order ``order``, the next ``order`` at each call; ``checkpointed`` recomputes them in backward."""

    def __init__(self, orders: Sequence[Sequence[int]], checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(1 + max(max(order) for order in orders)))
        self.orders, self.checkpointed, self.calls = orders, checkpointed, 0

    def forward(self, x: Tensor) -> Tensor:
        order = self.orders[self.calls % len(self.orders)]
        self.calls += torch.is_grad_enabled()
        for index in order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


PLAIN = [range(8)]
TWICE = [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]
SKIPS = [range(8), [0, 2, 4, 6], [7, 6, 5, 4, 3, 2, 1, 0], [0, 0, 1, 1, 7]]
BLOCK_BYTES = 4 * sum(p.numel() for p in Block().parameters())


def auto(capacity: int, warmup: float = 0.8, steady: float = 0.9, margin: float = 0.0) -> TierPlan:
    """Placement from the trace."""
    ratios = AutoPlan(warmup_non_model_ratio=warmup, steady_capacity_ratio=steady, margin_ratio=margin)
    return replace(on_device(), device_capacity_bytes=capacity, auto=ratios)


def plan_of(tiers: TierPlan | None = None, **changes: Any) -> Plan:
    """ZeRO-3 by block, nothing fetched ahead."""
    plan = zero(3).but(**({"prefetch": 0} | changes))
    return plan if tiers is None else plan.but(tiers=tiers)


@dataclass
class Found:
    """One training run on a rank; lists by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: str = ""
    moved: list[int] = field(default_factory=list)
    budgets: list[list[int]] = field(default_factory=list)
    peak_gathered: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    stats: MemStats | None = None
    rest: int = 0
    """The most besides model data, over all steps that were traced."""


Step = Callable[[Session, int], list[Tensor]]
"""Losses of one step, each for a backward pass."""


def x_of(rank: int, step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def plain_step(session: Session, step: int) -> list[Tensor]:
    return [session.module(x_of(session.mesh.rank, step)).square().mean()]


def train(
    build_model: Callable[[], nn.Module],
    plan: Plan,
    mesh: Mesh | None,
    step_of: Step = plain_step,
    steps: int = 4,
    prepare: Callable[[Session], None] | None = None,
    watched: bool = True,
) -> Found:
    """One run on a rank; ``watched``: with :func:`watch`, which takes several times as long as the training."""
    torch.manual_seed(0)
    model = build_model()
    found = Found()
    with sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, mesh) as session:
        if prepare is not None:
            prepare(session)
        pool = session.engine.pool
        found.sizes = dict(pool.sizes)
        if watched:
            watch(session, found)
        for step in range(steps):
            before, pool.peak_gathered_bytes = pool.moved_bytes, 0
            found.budgets.append([])
            for loss in step_of(session, step):
                session.backward(loss)
                found.losses.append(float(loss.detach()))
            session.optimizers[0].step()
            found.norms.append(session.optimizers[0].get_grad_norm() or math.nan)
            found.moved.append(pool.moved_bytes - before)
            found.peak_gathered.append(pool.peak_gathered_bytes)
            stats = session.memory_stats()
            found.rest = max(found.rest, stats.peak_non_model_bytes if stats is not None else 0)
        found.peak = session.ledger.peak_bytes
        found.tiers = session.memory().by_tier
        found.stats = session.memory_stats()
        found.state = digest([session.module.state_dict(), session.optimizers[0].state_dict()])
    return found


def watch(session: Session, found: Found) -> None:
    """Note the budget at each use, and compare the accounts with a count of their own."""
    pool, ledger = session.engine.pool, session.ledger

    def use(unit: int) -> None:
        if pool.in_training and len(found.budgets[-1]) < len(pool.trace.current):
            found.budgets[-1].append(pool.budget_bytes())

    def ready(unit: int) -> None:
        if ledger.capacity_bytes is not None:
            counted, accounted = model_data(session), ledger.model_bytes() - foreseen(session)
            assert counted == accounted, f"{accounted} bytes are accounted, {counted} are there: {ledger.held()}"
            held = sum(ledger.held().values())
            assert held <= ledger.capacity_bytes, f"{held} of {ledger.capacity_bytes}: {ledger.held()}"

    session.engine.events.unit_wanted.listen(use)
    session.engine.events.unit_ready.listen(ready)


def foreseen(session: Session) -> int:
    """Optimizer state that is accounted for and not made yet."""
    return session.engine.accounts.foreseen_bytes()


def model_data(session: Session) -> int:
    """Bytes of model data on the device, from the tensors themselves."""
    engine = session.engine
    tensors = [chunk.full for chunk in engine.shards.chunks if chunk.full is not None]
    tensors += [chunk.exchange.local for chunk in engine.shards.chunks if chunk.source.tier is Tier.DEVICE]
    tensors += [array for idle in engine.pool.arrays._idle.values() for array in idle]
    tensors += engine.grads.reducer._buckets.arrays()
    for grads in engine.grads.reducer.states:
        kept = (grads.bucket, grads.overflow)
        at_home = (grads.kept_memory, grads.reduced) if grads.home is Tier.DEVICE else ()
        tensors += [t for t in (*kept, *at_home) if t is not None]
        if grads.ring is not None and grads.home is Tier.DEVICE:
            tensors += grads.ring.idle()
    for own in session.optimizers:
        for tile in own.updates.tiles:
            if tile.state.tier is Tier.DEVICE:
                tensors += [tile.state.master] if tile.state.master is not None else []
                for piece in tile.pieces:
                    tensors += [v for v in own.optimizer.state.get(piece.value, {}).values() if isinstance(v, Tensor)]
        tensors += [s for (_, tier), s in own.updates.stepper._scratch.items() if tier is Tier.DEVICE]
    given_up = sum(s.nbytes() for s in (r() for r in engine.pool.arrays._dropped) if s is not None)
    return live_bytes(tensors) + given_up
