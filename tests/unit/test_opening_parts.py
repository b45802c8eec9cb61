"""Who asks whom for the files of a checkpoint in parts, and what working that out costs: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from sets import full
from test_growth import FEW, MANY, SOME, work

from shardwise.checkpoint.exchange import Remote
from shardwise.checkpoint.find import Candidate, opening
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.parts import Part, Version

PER_HOST = 8
ROOT = "runs/t"


class Rank:
    """One of a run: what :func:`opening` makes of it is kept."""

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self.run, self._hosts = SimpleNamespace(rank=rank, size=len(hosts.of)), hosts
        self.clients: Sequence[int] = ()
        self.remote = Remote({}, {}, None)

    def hosts(self) -> Hosts:
        return self._hosts

    @contextmanager
    def exchange(self, directory: str, names: Sequence[str], clients: Sequence[int], remote: Remote) -> Iterator[None]:
        self.clients, self.remote = clients, remote
        yield


def opened(hosts: Hosts, version: Version, rank: int) -> Rank:
    found = Rank(hosts, rank)
    peers: Any = found
    with opening(peers, Candidate(ROOT, version)):
        return found


def hosts_of(*sizes: int) -> Hosts:
    of = [host for host, size in enumerate(sizes) for _ in range(size)]
    return Hosts(tuple(of), tuple(map(str, range(len(sizes)))))


def version_of(files: int, here: dict[int, Sequence[int]]) -> Version:
    """Which files each host has."""
    names = tuple(f"pieces-{file}.safetensors" for file in range(files))
    parts = {host: Part("t", "t", True, names=names, wrote=(0,) * files, here=tuple(own)) for host, own in here.items()}
    return Version("t", 1, parts=parts, shown=True)


CASES = {
    "each its own": (hosts_of(2, 2, 2), version_of(6, {0: [0, 1], 1: [2, 3], 2: [4, 5]})),
    "one has nothing": (hosts_of(2, 3, 2), version_of(4, {1: [0, 1], 2: [2, 3]})),
    "some have more": (hosts_of(3, 1, 2, 2), version_of(5, {0: [0, 1], 1: [0, 1, 2], 3: [4, 3, 2]})),
    "one has all": (hosts_of(1, 4, 3), version_of(3, {0: [0, 1, 2], 1: [1]})),
    "a manifest alone": (hosts_of(2, 2, 1), version_of(2, {0: [], 1: [0, 1]})),
    "all have all": (hosts_of(2, 1), version_of(2, {0: [0, 1], 1: [1, 0]})),
    "in another order": (
        Hosts((0, 1, 0, 2, 1, 0), ("a", "b", "c")),
        version_of(6, {0: [0, 2, 5], 1: [1, 4], 2: [3]}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_whoever_asks_is_answered(name: str) -> None:
    """Each rank knows by itself who asks it, as they know whom they ask: nobody waits for an answer, or for an end."""
    hosts, version = CASES[name]
    ranks = range(len(hosts.of))
    found = [opened(hosts, version, rank) for rank in ranks]
    for rank in ranks:
        assert list(found[rank].clients) == [other for other in ranks if rank in found[other].remote.asked], rank
        remote, mine = found[rank].remote, hosts.of[rank]
        here = version.parts[mine].here if mine in version.parts else ()
        assert set(remote.ranks) == set(range(len(version.any.names))) - set(here), rank
        assert all(file in version.parts[hosts.of[asked]].here for file, asked in remote.ranks.items()), rank
        for file, place in remote.places.items():
            assert place == f"{hosts.names[hosts.of[remote.ranks[file]]]}:{ROOT}/pieces-{file}.safetensors", rank
        assert (remote.manifest is None) == (mine in version.parts), rank
        assert remote.manifest is None or hosts.of[remote.manifest] in version.parts, rank


@pytest.mark.parametrize("idle", [False, *full(True)], ids=["all", "one host has nothing"])
def test_opening_takes_as_many_steps_as_there_are_ranks(idle: bool) -> None:
    """Not as many as there are pairs of ranks, or of hosts and files."""
    taken: list[int] = []
    for ranks in (FEW, SOME, MANY):
        hosts = hosts_of(*[PER_HOST] * (ranks // PER_HOST))
        here = {host: [*range(host * PER_HOST, (host + 1) * PER_HOST)] for host in range(len(hosts.names))}
        if idle:
            here[len(hosts.names) - 1] += here.pop(0)
        files = version_of(ranks, here)
        taken.append(sum(work(lambda h=hosts, v=files: opened(h, v, 3) and None).values()))
        assert len(taken) == 1 or taken[-1] <= 1.5 * (SOME // FEW) * taken[-2], taken
