"""Gradients of many passes add up in ``accumulate_dtype``, where whole ones are kept as where shards are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, replicated, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import one_mesh, sharded
from tests.support.sets import full

HALF, FIRST, NUMEL = torch.bfloat16, 256.0, 192
PLANS = {"ddp": replicated(HALF), "zero1": zero(1, HALF), "zero2": zero(2, HALF)}
# What a rank's passes add up to is a number of bf16, in which it travels, and no sum in bf16 comes there.
SLOPES = (1.0, 2.0)
STEPS = ([65], [33, 33], [1, 65])
"""Passes of each step, and those of them up to a reduced one; the first has a far larger gradient."""


class Sum(nn.Module):
    """Its loss has the gradient ``slope`` for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.zeros(NUMEL)), nn.Parameter(torch.zeros(7))

    def forward(self, slope: float) -> Tensor:
        return ((self.weight.sum() + self.other.sum()) * slope).float()


def window(session: Session, passes: int) -> None:
    """Of the passes one is reduced, where whole gradients are kept."""
    for left in reversed(range(passes)):
        with session.no_sync() if left and session.plan.shard.reduce == "last" else nullcontext():
            session.backward(session.module(SLOPES[session.mesh.rank] * (FIRST if left + 1 == passes else 1.0)))


def all_alike(found: dict[str, Tensor]) -> float:
    values = {float(each) for tensor in found.values() for each in (tensor.min(), tensor.max())}
    assert len(values) == 1
    return values.pop()


def trained(plan: Plan, mesh: Mesh) -> tuple[list[float], dict[str, int]]:
    """Gradients of three steps, and the weights behind them; and what a step of two reduced passes sent."""
    model, found = Sum(), []
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, mesh) as session:
        for windows in STEPS:
            session.reset_traffic()
            for passes in windows:
                window(session, passes)
            sent = session.traffic()
            found.append(all_alike(session.full_gradients()))
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [*found, all_alike(session.module.state_dict())], sent


def memory(plan: Plan, mesh: Mesh) -> tuple[list[int], int, int]:
    """Bytes of gradients behind steps of one and of some passes; elements of whole gradients and of shards."""
    model, found = Sum(), []
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, mesh) as session:
        for passes in (1, 3, 1):
            window(session, passes)
            session.optimizer.step()
            session.optimizer.zero_grad()
            found.append(session.memory().gradients_bytes)
        chunks = session.engine.shards.chunks
        return found, sum(c.spec.padded_numel for c in chunks), sum(c.shard_numel for c in chunks)


def measured(name: str) -> dict[Any, Any]:
    plan, found = PLANS[name], {}
    with one_mesh(plan) as mesh:
        for dtype in (None, torch.float32):
            chosen = plan.but(accumulate_dtype=dtype)
            found[dtype] = (*trained(chosen, mesh), memory(chosen, mesh))
    return found


@pytest.mark.parametrize("name", [*full("ddp"), "zero1", *full("zero2")])
def test_passes_add_up_in_accumulate_dtype(name: str) -> None:
    for ranks in (1, 2):
        mean = sum(SLOPES[:ranks]) / ranks
        for found in run_ranks(ranks, measured, name):
            (half, sent_half, (_, _, _)), (wide, sent, _) = found[None], found[torch.float32]
            sums = [mean * sum(FIRST + passes - 1 for passes in windows) for windows in STEPS]
            assert wide == [*sums, -sum(sums)]
            assert half[0] != wide[0] and sent == sent_half


def test_memory_of_it_is_taken_by_who_makes_several_passes() -> None:
    for name in ("ddp", "zero1"):
        for found in run_ranks(2, measured, name):
            (before, whole, shard), (after, _, _) = found[None][2], found[torch.float32][2]
            more = [b - a for a, b in zip(before, after, strict=True)]
            assert more == [4 * shard, 4 * shard + 4 * whole, 4 * shard + 4 * whole]
