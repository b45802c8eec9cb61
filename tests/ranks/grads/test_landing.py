"""Offload to the host without waiting: gradients land when they are read, uploads have a stream of their own."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.core.grads import offload as landing
from shardwise.core.grads.offload import MAX_IN_FLIGHT, _Copy
from shardwise.core.memory.tier import Tier
from shardwise.plan import zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import adam, one_mesh, seeded, sharded
from tests.support.stream_setup import LAYERS, Branching, losses_of
from tests.support.tier_setup import with_tiers

STEPS, PASSES = 3, 3


class Slow(_Copy):
    """Memory has its values no sooner than it is waited for."""

    waits = 0

    def __init__(self, memory: Tensor, out: Tensor) -> None:
        self._memory, self._values = memory, out.clone()
        memory.fill_(float("nan"))

    def land(self) -> None:
        Slow.waits += 1
        self._memory.copy_(self._values)


def train(stage: int, ahead: bool) -> tuple[dict[str, Tensor], list[int], int, int]:
    """The parameters; how often the host waited in each pass; gradient memory on the host, and what is kept of it."""
    plan = with_tiers(zero(stage), "s_host", "no disk is used")
    model = seeded(Branching)
    with contextlib.ExitStack() as stack:
        if ahead:
            stack.enter_context(mock.patch.object(landing, "runs_ahead", lambda _device: True))
            stack.enter_context(mock.patch.object(landing, "_Copy", Slow))
        mesh = stack.enter_context(one_mesh(plan))
        session = stack.enter_context(sharded(model, adam(model, lr=0.01), plan, mesh))
        waited = []
        for step in range(STEPS):
            for index in range(PASSES):
                Slow.waits = 0
                session.backward(losses_of(session.module, mesh.rank, PASSES * step + index, False))
                waited.append(Slow.waits)
            session.optimizer.step()
        kept = sum(m.nbytes for s in session.engine.grads.states.values() if (m := s.kept_memory) is not None)
        return session.module.state_dict(), waited, session.engine.grads.reducer.bytes(Tier.HOST), kept


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_land_when_they_are_read(stage: int) -> None:
    ranks = zip(run_ranks(2, train, stage, True), run_ranks(2, train, stage, False), strict=True)
    for (late, waited, held, kept), (now, never, _, _) in ranks:
        assert set(never) == {0}
        assert waited[0::PASSES] == [0] * STEPS, "the first pass of a step only queues copies"
        assert all(0 < count <= 4 * LAYERS for count in waited[1::PASSES]), waited
        assert all(torch.equal(late[name], now[name]) for name in now)
        assert 0 < held - kept <= MAX_IN_FLIGHT * kept, "blocks are used again"
