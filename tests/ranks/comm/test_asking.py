"""Shards that one rank of a library's group gets alone: one thread of each peer answers whoever asks."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from alike_setup import PLANS, made, train
from launching import SECONDS, forked, start
from scope import Scope
from served_setup import ASKS, BETWEEN_S, EPOCHS, NUMELS, at_the_end, serving, wait_for, whole, write
from sets import full
from torch import Tensor

from shardwise.comm import Buffer, Group
from shardwise.comm import serving as served
from shardwise.testing import run_ranks
from tests.support.alike import alike_mesh


def bounds_of(size: int, index: int) -> tuple[int, ...]:
    return tuple(rank * NUMELS[index] for rank in range(size + 1))


def shards_of(group: Group) -> list[Buffer]:
    return group.shards([(bounds_of(group.size, index), torch.float64) for index in range(len(NUMELS))], joint=False)


def update(group: Group, shards: list[Buffer], epoch: int) -> None:
    write(shards, group.rank, epoch)
    group.fence("after an update")


def expected(size: int, epoch: int, index: int) -> Tensor:
    return whole(bounds_of(size, index), epoch, index)


def ask(group: Group, shards: list[Buffer], index: int) -> tuple[Tensor, object]:
    out = torch.full((NUMELS[index] * group.size,), 7.0, dtype=torch.float64)
    return out, group.ask(out, shards[index])


def asks_as_it_likes(seed: int, trials: int) -> tuple[int, set[int]]:
    """Other shards, in another order, another number of them, with naps; some ranks ask for nothing."""
    made_, threads = 0, set()
    for trial in range(trials):
        with Scope("asking") as group:
            draw = random.Random(f"{seed} {trial} {group.rank}")
            shards = shards_of(group)
            group.serve(shards)
            for epoch in range(EPOCHS):
                update(group, shards, epoch)
                flying = []
                for _ in range(draw.randrange(9)):
                    index = draw.randrange(len(NUMELS))
                    flying.append((index, *ask(group, shards, index)))
                    made_ += 1
                    if draw.random() < 0.3:
                        time.sleep(draw.random() / 200)
                draw.shuffle(flying)
                for index, out, handle in flying:
                    handle.wait()
                    assert torch.equal(out, expected(group.size, epoch, index))
                threads.add(len(serving()))
                group.barrier()  # nobody writes what others still ask for
    return made_, threads


@pytest.mark.parametrize("size", [*full(2), 3, *full(5)])
def test_a_rank_gets_alone_what_it_likes(size: int) -> None:
    found = run_ranks(size, asks_as_it_likes, 11, 2)
    assert sum(count for count, _ in found) > 10 * size
    assert all(threads == {1} for _, threads in found), found


def ahead_of_a_slow_update() -> tuple[bool, bool]:
    """Who has made one update more than a peer gets what that one's shards are behind its own."""
    with Scope("asking") as group:
        shards = shards_of(group)
        group.serve(shards)
        update(group, shards, 0)
        group.barrier()
        if group.rank == 1:
            time.sleep(0.3)
        update(group, shards, 1)
        (out, handle), (other, second) = ask(group, shards, 1), ask(group, shards, 2)
        second.wait()
        handle.wait()
        found = torch.equal(out, expected(group.size, 1, 1)), torch.equal(other, expected(group.size, 1, 2))
        group.barrier()
        return found


def test_who_is_ahead_gets_what_comes() -> None:
    assert run_ranks(3, ahead_of_a_slow_update) == [(True, True)] * 3


def gone(group: Group) -> str:
    """What a rank is told that asks a peer whose process is no more."""
    shards = shards_of(group)
    group.serve(shards)
    update(group, shards, 0)
    group.barrier()
    if group.rank == 2:
        os._exit(3)
    while True:  # it answers until it is gone
        try:
            ask(group, shards, 1)[1].wait()  # type: ignore[attr-defined]
        except served.PeerError as error:
            return str(error)
        time.sleep(0.01)


def ends(rank: int, meet: str, how: str) -> None:
    """A process of its own, which ends as Python's main does, threads and all."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=3)
    group = Scope("asking").group
    if how == "one is gone":
        assert "rank 2" in gone(group)
    else:
        shards = shards_of(group)
        group.serve(shards)
        update(group, shards, 0)
        for _ in range(ASKS if rank or how != "is slow" else 0):
            if how == "is slow":
                wait_for(Path(f"{meet}-ended"))
                time.sleep(BETWEEN_S)
            out, handle = ask(group, shards, 1)
            handle.wait()
            assert torch.equal(out, expected(3, 0, 1))
    if how == "forgets":
        dist.destroy_process_group()
    if how == "one is gone":
        served.leave_at_exit()
        raise SystemExit(0)
    with at_the_end(of_slow=how == "is slow" and rank == 0):
        if rank == 0:
            Path(f"{meet}-ended").touch()
        served.leave_at_exit()
    raise SystemExit(len(serving()))


@pytest.mark.parametrize("how", ["just ends", *full("forgets", "is slow", "one is gone")])
def test_a_process_ends(how: str, tmp_path: object) -> None:
    ranks = [start(forked(ends, rank, f"{tmp_path}/meet", how)) for rank in range(3)]
    for each in ranks:
        each.join(SECONDS)
    assert [each.exitcode for each in ranks] == [0, 0, 3 if how == "one is gone" else 0]


@pytest.mark.full
def test_a_played_step_among_thousands_meets_as_often_whatever_the_units() -> None:
    """Rounds would be messages a unit, twice a step; and a thread for each peer thousands of threads."""
    found = []
    for blocks in (4, 12):
        with alike_mesh(PLANS["zero3"], 2000, 4096, "queued") as (mesh, asked):
            session = made(PLANS["zero3"], mesh, blocks)
            train(session, 3)
            asked.reset()
            train(session, 1)
            found.append((asked.calls["send"], asked.calls["receive"], len(serving())))
            session.close()
    assert found[0] == found[1] == (2 * 12, 2 * 12, 1)  # two meetings, of a message for each digit of 4096
