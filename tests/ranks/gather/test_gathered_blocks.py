"""gathered() blocks that end in another order than they began in, or are interrupted where they end."""

from __future__ import annotations

import gc

from engine_setup import adam, data, seeded, sharded
from interrupts import Interrupts
from torch import nn

from shardwise.build import Session
from shardwise.gather import pool
from shardwise.plan import zero
from shardwise.testing import run_ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


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


def interrupted() -> list[str]:
    model, inside, left = seeded(net), Interrupts([pool]), list[str]()
    with sharded(model, adam(model), zero(3)) as session:

        def act() -> None:
            with session.module.gathered():
                pass

        act()
        inside.run(act)
        for at in range(inside.passed):
            came = inside.run(act, at)
            gc.collect()
            if came and "leave_block" in inside.where:
                one_step(session)
                left.append(f"{inside.where} {session.engine.pool.blocks.all_held}")
    return left


def test_an_interrupt_at_the_end_leaves_no_block_open() -> None:
    (left,) = run_ranks(1, interrupted)
    assert left
    assert not [each for each in left if not each.endswith("False")]
