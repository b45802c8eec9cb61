"""Gathers over messages that peers' threads answer: in any order, whatever the peers do, without agreement.

Over mapped memory a gather reads what is there; here it is asked for, and comes from a thread of the peer.
"""

from __future__ import annotations

import gc
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_setup import adam, check, data, run_plain, run_sharded, seeded, sharded
from launching import SECONDS, forked, start
from scope import Scope
from served_setup import BETWEEN_S, EPOCHS, NUMELS, at_the_end, serving, wait_for, whole, write
from sets import full
from torch import Tensor, nn
from wander_setup import GLOO, Wanderer, counted, fails_and_goes_on, wander

from shardwise.build import build
from shardwise.comm import GlooGroup, gloo
from shardwise.comm import serving as served
from shardwise.comm.link import Link, Message
from shardwise.gather import policy
from shardwise.plan import Plan
from shardwise.testing import run_ranks

MEETINGS = ["which parameters had gradients", "the gradient norm"]
"""Of a step. The first overlaps with reductions, the second is the fence before the update, too."""


def each_its_own_way(kind: str, seed: int, trials: int) -> int:
    """Ranks gather other shards, in another order, another number of them, with naps. How many in all."""
    made = 0
    for trial in range(trials):
        with Scope(kind) as group:
            draw = random.Random(f"{seed} {trial} {group.rank}")
            parts = [
                [(numel + rank * (index + trial) % 5) for rank in range(group.size)]
                for index, numel in enumerate(NUMELS)
            ]
            bounds = [tuple(sum(part[:rank]) for rank in range(group.size + 1)) for part in parts]
            shards = group.shards([(each, torch.float64) for each in bounds], joint=False)
            group.serve(shards)
            for epoch in range(EPOCHS):
                write(shards, group.rank, epoch)
                group.fence("after an update")
                flying = []
                for _ in range(draw.randrange(9)):
                    index = draw.randrange(len(NUMELS))
                    out = torch.full((bounds[index][-1],), 7.0, dtype=torch.float64)
                    flying.append((index, out, group.all_gather(out, shards[index])))
                    made += 1
                    if draw.random() < 0.3:
                        time.sleep(draw.random() / 200)
                    if draw.random() < 0.5:
                        flying[draw.randrange(len(flying))][2].wait()
                group.fence("before an update")  # what is under way arrives first
                for index, out, handle in flying:
                    assert torch.equal(out, whole(bounds[index], epoch, index))
                    handle.wait()
    return made


@pytest.mark.parametrize(("kind", "size"), [("gloo", 3), *full(("gloo", 2))])
def test_ranks_gather_what_they_like(kind: str, size: int) -> None:
    assert len(set(run_ranks(size, each_its_own_way, kind, 2, 6))) == size, (
        "all made the same number: nothing was tried"
    )


def late_writer(kind: str, fences: bool) -> bool:
    """Whether a rank that asks early gets what a slow one is about to write."""
    unfenced = mock.patch.object(GlooGroup, "fence", lambda *_: None)
    with Scope(kind) as group:
        bounds = tuple(range(0, 5 * group.size + 1, 5))
        shards = group.shards([(bounds, torch.float64)], joint=False)
        group.serve(shards)
        group.barrier()
        with nullcontext() if fences else unfenced:
            if fences:
                time.sleep(0.3 * group.rank)
            elif group.rank:  # until the first has gathered
                dist.barrier()
            write(shards, group.rank, 1)
            group.fence("after an update")
            out = torch.zeros(bounds[-1], dtype=torch.float64)
            group.all_gather(out, shards[0]).wait()
            if not fences and group.rank == 0:
                dist.barrier()
            group.barrier()
        return torch.equal(out, whole(bounds, 1, 0))


@pytest.mark.parametrize(("kind", "size"), [("gloo", 2)])
def test_who_reads_early_reads_what_is_written(kind: str, size: int) -> None:
    assert run_ranks(size, late_writer, kind, True) == [True] * size
    assert run_ranks(size, late_writer, kind, False) != [True] * size, "the test cannot fail"


def busy_peer() -> list[str]:
    """What comes first on a rank: the end of its gather, or its word to the peer that waits for nothing else."""
    events = list[str]()
    with Scope("gloo") as group:
        shards = group.shards([((0, 5, 10), torch.float64)], joint=False)
        group.serve(shards)
        write(shards, group.rank, 1)
        group.fence("after an update")
        word = torch.zeros(1)
        if group.rank:
            dist.recv(word, src=0)
            events.append("told")
        else:
            out = torch.zeros(10, dtype=torch.float64)
            group.all_gather(out, shards[0]).wait()
            assert torch.equal(out, whole((0, 5, 10), 1, 0))
            events.append("gathered")
            dist.send(word, dst=1)
        group.barrier()
        return events


def test_a_gather_needs_no_turn_of_the_peer() -> None:
    """If it did, neither rank would come to its end."""
    assert run_ranks(2, busy_peer) == [["gathered"], ["told"]]


# ---- in training


def meetings(plan: Plan, layers: int, steps: int) -> list[list[str]]:
    model, found = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])), []
    with counted() as purposes, sharded(model, adam(model), plan) as session:
        assert session.optimizer is not None
        for step in range(steps):
            purposes.clear()
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
            session.optimizer.zero_grad()
            found.append(list(purposes))
    return found


@pytest.mark.parametrize(("size", "layers"), [(2, 24), *full((3, 24)), (2, 5)])
def test_a_step_has_few_meetings_however_many_units(size: int, layers: int) -> None:
    for steps in run_ranks(size, meetings, GLOO, layers, 4):
        for purposes in steps[1:]:  # the first one agrees on the order of reductions
            assert purposes == MEETINGS


def test_rounds_are_still_there_where_they_are_needed() -> None:
    """A rank that has no room tells the others."""
    for steps in run_ranks(2, meetings, GLOO.but(device_capacity_bytes=1 << 30), 5, 2):
        assert steps[1].count("what to gather") > 5


def among_many() -> list[list[str]]:
    with mock.patch.object(gloo, "MOST_SERVED", 1):
        return meetings(GLOO, 5, 2)


def test_among_very_many_ranks_there_are_no_threads_but_rounds() -> None:
    for steps in run_ranks(2, among_many):
        assert steps[1].count("what to gather") > 5


def ends_early(closes: bool) -> Tensor:
    """One rank is through with its model, and drops or closes it, while the others still gather."""
    model = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]))
    session = build(model, adam(model), GLOO)
    for layer in model if session.mesh.rank else ():
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    with torch.inference_mode():
        out = session.module(data(0, 0)).clone()
    if closes:
        session.close()
        session.mesh.close()
    else:
        kept = session.mesh  # for other models
        del session, model
        gc.collect()
        assert kept.size >= 2
    return out


def under_way(layers: int, small: bool) -> int:
    """The most units on their way at the first use of a step, of equal ones, when one may be fetched ahead."""
    model, most = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])), 0
    with (
        mock.patch.object(policy, "AHEAD_BYTES", 1 << 20 if small else 1),
        sharded(model, adam(model), GLOO) as session,
    ):
        assert session.optimizer is not None
        for step in range(3):
            pool, found = session.engine.pool, []
            hook = model[0].register_forward_hook(lambda *_, found=found, pool=pool: found.append(len(pool._held)))
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
            session.optimizer.zero_grad()
            hook.remove()
            most = max(most, found[0])
    return most


@pytest.mark.parametrize(("small", "units"), [(True, 9), (False, 2)])
def test_small_units_are_fetched_far_ahead(small: bool, units: int) -> None:
    """Each gather is a round trip, which the computation of a small unit does not hide."""
    assert run_ranks(2, under_way, 9, small) == [units, units]


@pytest.mark.parametrize(("closes", "size"), [(False, 2), *full((True, 3))])
def test_who_ends_early_leaves_the_others_what_they_need(size: int, closes: bool) -> None:
    one, *others = run_ranks(size, ends_early, closes)
    assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize(("prefetch", "size"), [(0, 2), (2, 3), *full((0, 3), (2, 2))])
def test_ranks_that_wander_train_as_in_plain_torch(size: int, prefetch: int) -> None:
    found = run_ranks(size, run_sharded, Wanderer, wander, GLOO.but(prefetch=prefetch, gathered_fraction=0.2), 4)
    check(found, run_plain(Wanderer, wander, size, 4), f"{size} ranks", 1e-9)


def test_a_rank_that_fails_goes_on() -> None:
    ends = run_ranks(2, fails_and_goes_on)
    assert all(each[-1] == "made 2" for each in ends) and "ArithmeticError" in ends[1]


# ---- the end


def places_and_words() -> tuple[int, int, list[int]]:
    """Places for a peer's requests at the beginning, those that there should be, and this rank's words in order."""
    posted, words = [], []
    receive, say = Link.receive_aside, served._End.say

    def receiving(link: Link, tensor: Tensor, peer: int, tag: int, what: str) -> Message:
        posted.append(tag)
        return receive(link, tensor, peer, tag, what)

    def saying(end: Any, word: int, number: int = 0) -> None:
        words.append(word)
        say(end, word, number)

    with mock.patch.object(Link, "receive_aside", receiving), mock.patch.object(served._End, "say", saying):
        with Scope("gloo") as group:
            shards = group.shards([((0, 5, 10), torch.float64)], joint=False)
            group.serve(shards)
            until = time.monotonic() + SECONDS
            while posted.count(served.ASK) < served.OPEN and time.monotonic() < until:
                time.sleep(0.01)
            found = posted.count(served.ASK)
            group.barrier()
        del shards  # what is dropped behind the end is said to nobody: nothing waits for it any more
        gc.collect()
    return found, served.OPEN, [word for word in words if word not in (served.LEAVES_LAST, served.FAREWELL)]


def test_a_peer_has_places_for_many_requests() -> None:
    """gloo sends a message when it has heard of a place for it: with one, each request would wait for a trip."""
    for found, wanted, words in run_ranks(2, places_and_words):
        assert found == wanted
        assert words in ([], [served.LEAVES])


def dropped() -> tuple[int, int]:
    """Threads while a session is there, and a moment after it is gone."""
    model = seeded(lambda: nn.Linear(6, 6))
    session = build(model, adam(model), GLOO)
    during = len(serving())
    session.module(data(0, 0))
    del session, model
    until = time.monotonic() + SECONDS
    while serving() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return during, len(serving())


def test_what_is_dropped_serves_no_more() -> None:
    assert run_ranks(3, dropped) == [(2, 0)] * 3


def ends(rank: int, port_file: str, how: str) -> None:
    """A process of its own, which ends as Python's main does, threads and all."""
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    model = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]))
    session = build(model, adam(model), GLOO)
    ended = Path(f"{port_file}-ended")

    def slow(*_: object) -> None:
        wait_for(ended)
        time.sleep(BETWEEN_S)

    for layer in model if rank and how == "is slow" else ():
        layer.register_forward_pre_hook(slow)
    out = session.module(data(0, 0))
    if how == "forgets":
        dist.destroy_process_group()
    assert out.isfinite().all()
    with at_the_end(of_slow=how == "is slow" and rank == 0):
        if rank == 0:
            ended.touch()
        served.leave_at_exit()
    raise SystemExit(len(serving()))


@pytest.mark.parametrize("how", ["just ends", *full("forgets", "is slow")])
def test_no_thread_waits_when_the_process_ends(how: str, tmp_path: object) -> None:
    ranks = [start(forked(ends, rank, f"{tmp_path}/meet", how)) for rank in range(2)]
    for each in ranks:
        each.join(SECONDS)
    assert [each.exitcode for each in ranks] == [0, 0]
