"""Ranks of several hosts: every byte goes to a host once, and nobody needs a peer's turn for what it asks.

Which host a rank is on is its own word here, so that trials take no network; tests/ranks/engine/test_two_hosts.py has
real ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from scope import PER_HOST, Scope, hosts_of, values
from sets import full

from shardwise.comm import Buffer, GlooGroup, Group, GroupMaker, HostsGroup, PeerError, choose, hosts, landed
from shardwise.comm.landing import ENTRIES, HERE, LOST, UNDER_WAY, Landing
from shardwise.comm.places import Places
from shardwise.testing import run_ranks

CPU = torch.device("cpu")
NUMEL = 1000


def host(rank: int) -> int:
    return rank // PER_HOST


def by_host(found: list[dict[str, int]]) -> list[dict[str, int]]:
    """What the ranks of each host have received, together."""
    totals = [Counter[str]() for _ in range(host(len(found) - 1) + 1)]
    for rank, each in enumerate(found):
        totals[host(rank)].update(each)
    return [dict(total) for total in totals]


def moved(flat: bool, operation: str, dtype: torch.dtype) -> dict[str, int]:
    """From other hosts, by this rank, in one operation of ``NUMEL`` elements a rank."""
    with hosts_of(PER_HOST):
        maker = GroupMaker(CPU, None, 60.0, by_hosts=not flat)
        group = maker.make("test", [list(range(torch.distributed.get_world_size()))])
    assert type(group) is (GlooGroup if flat else HostsGroup)
    full, shard, out = _buffers(group, dtype)
    group.barrier()
    group.reset_traffic()
    if operation == "reduce_scatter":
        group.reduce_scatter(torch.empty(NUMEL, dtype=dtype), full, 1.0).wait()
    elif operation == "all_reduce":
        group.all_reduce(full, 1.0).wait()
    elif operation == "in place":
        group.all_gather_in_place(full).wait()
    else:
        if operation == "asked for":
            group.serve([shard])
            group.fence("after an update")
        group.all_gather(out, shard).wait()
    found = group.from_other_hosts()
    full.wait_writable()
    group.barrier()
    group.close()
    maker.close()
    return found


def _buffers(group: Group, dtype: torch.dtype) -> tuple[Buffer, Buffer, torch.Tensor]:
    (full,) = group.buffers([(group.size * NUMEL, dtype)])
    (shard,) = group.shards([(range(0, group.size * NUMEL + 1, NUMEL), dtype)], joint=False)
    return full, shard, torch.empty(group.size * NUMEL, dtype=dtype)


def expected(flat: bool, operation: str, dtype: torch.dtype, size: int, own: int) -> dict[str, int]:
    """What host ``own`` has to receive: slices of its ranks from each other host, shards of each other rank."""
    counts = Counter(map(host, range(size)))
    here, elsewhere = counts[own], size - counts[own]
    gathered = elsewhere * NUMEL * dtype.itemsize * (here if flat else 1)
    reduced = 0
    for other, ranks in counts.items():
        sums = 1 if not flat else ranks
        width = 4 if dtype.itemsize < 4 and ranks > 1 and not flat else dtype.itemsize
        reduced += here * NUMEL * sums * width if other != own else 0
    if operation == "reduce_scatter":
        return {"gather": 0, "reduce": reduced}
    if operation == "all_reduce":
        return {"gather": 0, "reduce": reduced + gathered}
    return {"gather": gathered, "reduce": 0}


OPERATIONS = ("reduce_scatter", "all_reduce", "in place", "taking part", "asked for")
CASES = list(itertools.product(OPERATIONS, (torch.float32, torch.bfloat16), (3, 4)))
FEW = [(operation, *CASES[index % 4][1:]) for index, operation in enumerate(OPERATIONS)]
"""Each operation, length of elements and number of ranks."""


@pytest.mark.parametrize(
    ("operation", "dtype", "size"),
    [case if case in FEW else full(case)[0] for case in CASES],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_bytes_between_hosts(operation: str, dtype: torch.dtype, size: int) -> None:
    for flat in (False, True):
        found = by_host(run_ranks(size, moved, flat, operation, dtype))
        assert found == [expected(flat, operation, dtype, size, own) for own in range(len(found))]


# ---- gathers that are asked for


def served(group: Group, numels: tuple[int, ...] = (NUMEL,)) -> list[Buffer]:
    shards = group.shards([(range(0, group.size * n + 1, n), torch.float32) for n in numels], joint=False)
    group.serve(shards)
    for shard in shards:
        shard.local.copy_(values(group.rank, shard.local.numel(), torch.float32))
    group.fence("after an update")
    return shards


def gathered(group: Group, shard: Buffer) -> dict[str, int]:
    """What it took from other hosts; the result is right."""
    before, numel = group.from_other_hosts()["gather"], shard.local.numel()
    out = torch.full((group.size * numel,), 7.0)
    group.all_gather(out, shard).wait()
    assert torch.equal(out, torch.cat([values(rank, numel, torch.float32) for rank in range(group.size)]))
    return {"gather": group.from_other_hosts()["gather"] - before}


def one_alone(alone: int) -> dict[str, int]:
    with Scope("hosts") as group:
        (shard,) = served(group)
        found = {"gather": 0}
        if group.rank == alone:
            found = gathered(group, shard)
        torch.distributed.barrier()  # the others are in the midst of something else
        group.barrier()
        return found


def test_who_needs_a_shard_alone_brings_it_alone() -> None:
    assert run_ranks(4, one_alone, 1) == [{"gather": n} for n in (0, 2 * NUMEL * 4, 0, 0)]


def again(ring: int) -> list[int]:
    """Two shards, gathered by all in turn, twice between two fences, and once behind them."""
    told = []
    with mock.patch.object(hosts, "LANDING_BYTES", ring), Scope("hosts") as group:
        one, other = served(group, (NUMEL, NUMEL))
        for round_ in range(2):
            for shard in (one, other, one, other) if round_ == 0 else (one, other):
                group.barrier()
                told.append(gathered(group, shard)["gather"])
            group.fence("before an update")
            group.fence("after an update")
    return told


@pytest.mark.parametrize(("ring", "brought"), [(1 << 20, (1, 1, 0, 0, 1, 1)), (0, (1, 1, 0, 0, 1, 1))])
def test_what_has_come_is_not_asked_for_again_before_the_next_update(ring: int, brought: tuple[int, ...]) -> None:
    found = run_ranks(4, again, ring)
    for first in (0, 2):
        sums = [one + other for one, other in zip(found[first], found[first + 1], strict=True)]
        assert sums == [2 * NUMEL * 4 * each for each in brought]


def short_of_room() -> int:
    """A ring for one of two shards, which a rank has under way both."""
    with Scope("hosts") as group:
        assert isinstance(group, HostsGroup)
        one, other = served(group, (NUMEL, NUMEL))
        group._landing = Landing(group.inside, 2 * NUMEL * 4)
        outs = [torch.zeros(group.size * NUMEL) for _ in range(2)]
        handles = [group.all_gather(out, shard) for out, shard in zip(outs, (one, other), strict=True)]
        for out, handle in zip(outs, handles, strict=True):
            handle.wait()
            assert torch.equal(out, torch.cat([values(rank, NUMEL, torch.float32) for rank in range(group.size)]))
        group.barrier()
        gathered(group, other)  # by now there is room
        group.fence("before an update")
        return group.from_other_hosts()["gather"]


def test_what_has_no_room_goes_past() -> None:
    found = run_ranks(4, short_of_room)
    for first in (0, 2):
        # One once and the other twice, or once where one rank had both before the other began; then once more at most.
        assert found[first] + found[first + 1] in [2 * NUMEL * 4 * times for times in (2, 3, 4)]


def lost(how: str) -> dict[str, int]:
    """Rank 0 brings nothing: its gather is marked as lost, or it is gone; rank 1 asks for itself."""
    with Scope("hosts") as group:
        (shard,) = served(group)
        assert isinstance(group, HostsGroup)
        place = group._landing
        assert place is not None
        found = {"gather": 0}
        if group.rank == 0:
            entry, mine = place.enter(group._fences * hosts.EPOCH + shard.number, 2 * NUMEL * 4)
            assert entry is not None and mine and place.state(entry) == UNDER_WAY
            if how == "lost":
                place.mark(entry, LOST)
        group.barrier()
        if group.rank == 1:
            away = mock.patch.object(group.inside, "fate", lambda _: "is away") if how == "gone" else mock.MagicMock()
            with away:
                found = gathered(group, shard)
        group.barrier()
        return found


@pytest.mark.parametrize("how", ["lost", "gone"])
def test_what_another_rank_has_lost_is_asked_for_again(how: str) -> None:
    assert run_ranks(4, lost, how)[1] == {"gather": 2 * NUMEL * 4}


def broken() -> list[str]:
    """The rank that brings a shard cannot; who waits for it can."""
    told = []
    with Scope("hosts") as group:
        (shard,) = served(group)
        out = torch.zeros(group.size * NUMEL)
        real = landed._bring

        def fails(messages: Any, *rest: Any) -> None:
            real(messages, *rest)
            rest[0].mark(rest[1], LOST)
            raise PeerError("broken on purpose")

        with mock.patch.object(landed, "_bring", fails) if group.rank == 0 else mock.MagicMock():
            if group.rank == 1:
                group.barrier()
            handle = group.all_gather(out, shard)
            if group.rank != 1:
                group.barrier()
            try:
                handle.wait()
                assert torch.equal(out, torch.cat([values(rank, NUMEL, torch.float32) for rank in range(group.size)]))
            except PeerError as error:
                told.append(str(error))
        group.barrier()
    return told


def test_a_gather_that_fails_is_an_error_of_who_brought_it_alone() -> None:
    assert run_ranks(4, broken) == [["broken on purpose"], [], [], []]


def table() -> None:
    """A ring used many times over: entries are found, forgotten from the oldest end, and never under a pin."""
    with Scope("hosts") as group:
        assert isinstance(group, HostsGroup)
        ring = Landing(group.inside, 1024)
        group.barrier()
        if group.rank % PER_HOST == 0:
            first, mine = ring.enter(1, 400)
            assert first is not None and mine
            second, mine = ring.enter(2, 400)
            assert second is not None and mine and ring.enter(2, 400)[1] is False
            assert ring.enter(3, 400) == (None, False) and ring.enter(4, 2000) == (None, False)
            ring.mark(second, HERE)
            ring.unpin(second)
            assert ring.enter(3, 400) == (None, False), "the older one is pinned"
            ring.unpin(first)
            assert ring.enter(2, 400)[1] is False, "what has room stays"
            third, mine = ring.enter(3, 400)
            assert third is not None and mine
            ring.unpin(third)
            ring.unpin(second)
            assert ring.enter(4, 400) == (None, False), "another gather of this rank has yet to copy it"
            ring.unpin(second)
            fourth, mine = ring.enter(4, 400)
            assert fourth is not None and mine
            ring.unpin(fourth)
            for key in range(5, 3 * ENTRIES):
                entry, mine = ring.enter(key, 60)
                assert entry is not None and mine and entry.at.numel() == 60
                entry.at.fill_(key % 251)
                again_, mine = ring.enter(key, 60)
                assert again_ is not None and not mine and again_.number == entry.number
                assert again_.at.eq(key % 251).all()
                ring.unpin(entry)
                ring.unpin(again_)
            assert ring.enter(3, 60)[1], "forgotten long ago"
            ring.unpin_all()
        group.barrier()


def test_the_ring() -> None:
    run_ranks(3, table)


# ---- which group it is


def chosen(per_host: int, **settings: Any) -> str:
    with hosts_of(per_host):
        maker = GroupMaker(CPU, settings.pop("shared_memory", None), 60.0, **settings)
        group = maker.make("test", [list(range(torch.distributed.get_world_size()))])
    name = type(group).__name__
    group.close()
    maker.close()
    return name


def every_choice() -> list[str]:
    return [chosen(4), chosen(2), chosen(1), chosen(2, shared_memory=False), chosen(2, by_hosts=False)]


def test_hosts_with_several_ranks_are_noticed() -> None:
    assert run_ranks(4, every_choice) == [["SharedGroup", "HostsGroup", "GlooGroup", "GlooGroup", "GlooGroup"]] * 4


def disagree() -> None:
    with pytest.raises(ValueError, match="by_hosts differs between the ranks"):
        chosen(2, by_hosts=torch.distributed.get_rank() > 0)


def test_ranks_must_want_the_same() -> None:
    run_ranks(3, disagree)


def one_host_cannot() -> str:
    """On the second host memory cannot be mapped; all ranks hear of it."""
    real = choose.SharedGroup

    def refuses(name: str, *args: Any) -> Any:
        if torch.distributed.get_rank() > 1:
            raise choose.MappingError("not here")
        return real(name, *args)

    with mock.patch.object(choose, "SharedGroup", refuses):
        return chosen(2)


def test_a_host_without_memory_to_share_is_heard_of_by_all() -> None:
    assert run_ranks(4, one_host_cannot) == ["GlooGroup"] * 4


def test_every_slice_has_one_speaker_on_each_host() -> None:
    names = ["a", "b", "a", "a", "c", "b", "a"]
    everyone = [Places(names, rank) for rank in range(len(names))]
    assert everyone[0].hosts == [(0, 2, 3, 6), (1, 5), (4,)]
    for rank, each in enumerate(everyone):
        assert rank in each.beside and sorted(each.elsewhere + list(each.beside)) == list(range(len(names)))
        assert sorted(p for member in each.beside for p in each.taken_by(member)) == each.elsewhere
        for p in each.takes:  # both sides name the same partner
            assert each.partner(each.own, p) == rank and everyone[p].partner(each.own, p) == rank
