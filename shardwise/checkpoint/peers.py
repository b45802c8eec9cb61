"""The ranks of a run as its checkpoints need them: who shares a host, and how they send each other what files hold."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.checkpoint.exchange import Exchange, Remote
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.run import Run

__all__ = ["Peers"]


class Peers:
    """Of one run. What it needs is made at first use, by all ranks together, and given back with it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._hosts: Hosts | None = None
        self._messages: Ranks | None = None
        self._exchanges: Ranks | None = None
        self._count = 0

    def hosts(self) -> Hosts:
        """Those of the run; all ranks as one host where parts of it cannot lie apart. Collective."""
        run = self.run
        if self._hosts is None or len(self._hosts.of) != run.size:
            alone = run.size == 1 or not run.spreads
            self._hosts = Hosts((0,) * run.size, ("",)) if alone else Hosts.meet(run.gather)
        return self._hosts

    def messages(self) -> Ranks:
        """For small ones, in the order in which all ranks come to them. Collective."""
        if self._messages is None or self._messages.outdated:
            self._messages = Ranks(own=False, members=self.run.members)
        return self._messages

    def exchange(self, directory: str, names: Sequence[str], clients: Sequence[int], remote: Remote) -> Exchange:
        """See :class:`Exchange`. Collective."""
        if self._exchanges is None or self._exchanges.outdated:
            self._exchanges, self._count = Ranks(own=True, members=self.run.members), 0
        self._count += 1
        return Exchange(self._exchanges.link("pieces"), self._count, directory, names, clients, remote)

    def close(self) -> None:
        """Give communicators back. Safe to call twice."""
        for ranks in (self._messages, self._exchanges):
            if ranks is not None:
                ranks.close()
        self._messages = self._exchanges = None
