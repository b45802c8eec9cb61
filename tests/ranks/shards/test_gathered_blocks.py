"""gathered() blocks that end in another order than they began in."""

from __future__ import annotations

from shardwise.plan import zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import adam, data, seeded, sharded
from tests.support.engine_setup import two_layers as net


def one_step(session: Session) -> None:
    session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
    session.optimizers[0].step()


def in_another_order() -> list[bool]:
    model = seeded(net)
    with sharded(model, adam(model), zero(3)) as session:
        first, second, held = session.module.gathered(), session.module.gathered(), list[bool]()
        first.__enter__()
        second.__enter__()
        for block in (first, second):
            block.__exit__(None, None, None)
            held.append(session.engine.pool.blocks.all_held)
        one_step(session)
    return held


def test_blocks_may_end_in_any_order() -> None:
    assert run_ranks(2, in_another_order) == [[True, False]] * 2
