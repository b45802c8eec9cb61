"""One rank of many beside the same rank among real ones: the same calls, of the same sizes."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.testing import run_ranks
from tests.support.alike import alike_mesh
from tests.support.alike_setup import PLANS, counted, made, real_steps, train
from tests.support.sets import campaign, full

STEPS, BLOCKS = 3, 3
QUICK = [(2, "zero1", "native"), (2, "zero2", "gloo"), (2, "zero3", "native"), (2, "hybrid", "gloo")]
QUICK += [(4, "hybrid", "native")]
PAIRS = [(4, "zero1", "gloo"), (4, "zero2", "native"), (4, "zero3", "gloo")]
REST = [case for case in product((2, 4), PLANS, ("native", "gloo")) if case not in QUICK + PAIRS]


@pytest.mark.parametrize(("ranks", "name", "transport"), [*QUICK, *full(*PAIRS), *campaign(*REST)])
def test_it_asks_for_what_a_real_rank_asks_for(ranks: int, name: str, transport: str) -> None:
    real = run_ranks(ranks, real_steps, name, transport, STEPS, BLOCKS)
    for rank in range(ranks):
        log, groups, shard_numel = real[rank]
        with alike_mesh(PLANS[name], rank, ranks, transport) as (mesh, asked):
            session = made(PLANS[name], mesh, BLOCKS)
            mesh.reset_traffic()
            asked.reset()
            train(session, STEPS)
            # In any order: when a reduction begins, among other operations, is a matter of waiting.
            assert sorted(asked.log) == sorted(log), f"rank {rank}"
            assert counted(mesh) == groups
            assert sum(chunk.shard_end - chunk.shard_start for chunk in session.engine.shards.chunks) == shard_numel
            session.close()
    assert len(log) > STEPS
