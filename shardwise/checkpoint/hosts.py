"""Which ranks are on one host, and see one file system under a path."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.comm.mapping import host_facts

__all__ = ["Hosts", "here", "place_of"]


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, in the order of their first ranks.

    Attributes:
        of: by rank, the number of its host.
        names: by host, what it calls itself.
    """

    of: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def meet(cls, gather: Callable[[object], list[Any]]) -> Hosts:
        """Those of all ranks. Collective."""
        return cls.sorted([tuple(row) for row in gather(here())])

    @classmethod
    def sorted(cls, views: list[tuple[str, str]]) -> Hosts:
        """From each rank's name of its host, and what tells its file systems."""
        numbers = {view: number for number, view in enumerate(dict.fromkeys(views))}
        return cls(tuple(numbers[view] for view in views), tuple(name for name, _ in numbers))

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """By host, its ranks."""
        found: list[list[int]] = [[] for _ in self.names]
        for rank, host in enumerate(self.of):
            found[host].append(rank)
        return tuple(map(tuple, found))

    def leads(self, rank: int) -> bool:
        """Whether ``rank`` is the first of its host."""
        return self.ranks[self.of[rank]][0] == rank


def here() -> tuple[str, str]:
    """What this host calls itself, and what is equal where processes see the same files under a path: of one machine,
    and of one container there."""
    facts, name = host_facts(), socket.gethostname()
    with contextlib.suppress(OSError):
        facts["mounts"] = os.readlink("/proc/self/ns/mnt")
    return name, "/".join([name, *facts.values()])


def place_of(path: str) -> list[str]:
    """Where this process finds ``path``: what tells its file systems from another host's, and the path in them."""
    return [here()[1], os.path.realpath(path)]
