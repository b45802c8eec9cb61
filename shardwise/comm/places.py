"""Which ranks of a group share a host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["Places"]


class Places:
    """The hosts of a group's ranks, as one of them sees it.

    What a host sends to a rank of another one a single rank of it sends, and what a rank sends to a host a single one
    takes: the one that stands there as it does here (its :meth:`partner`). So the ranks of a host share the work.

    Args:
        hosts: what stands for the host of each rank, by rank.
        rank: which of them this is.

    Attributes:
        hosts: ranks by host, in the order of their first ranks.
        own: number of this rank's host among these.
        beside: the ranks of this host, this one included.
        elsewhere: the others.
        takes: the ranks of other hosts that this one takes for its host, and speaks to for it.
    """

    def __init__(self, hosts: Sequence[Hashable], rank: int) -> None:
        found: dict[Hashable, list[int]] = {}
        for member, host in enumerate(hosts):
            found.setdefault(host, []).append(member)
        self.hosts = [tuple(ranks) for ranks in found.values()]
        self.own = list(found).index(hosts[rank])
        self.beside = self.hosts[self.own]
        here = set(self.beside)
        self.elsewhere = [member for member in range(len(hosts)) if member not in here]
        self._seat = {member: seat for ranks in self.hosts for seat, member in enumerate(ranks)}
        self._taken: dict[int, list[int]] = {member: [] for member in self.beside}
        for member in self.elsewhere:
            self._taken[self.partner(self.own, member)].append(member)
        self.takes = self._taken[rank]

    def partner(self, host: int, member: int) -> int:
        """Which rank of ``host`` speaks for it with ``member``, a rank of another host."""
        ranks = self.hosts[host]
        return ranks[self._seat[member] % len(ranks)]

    def taken_by(self, beside: int) -> list[int]:
        """The ranks of other hosts that ``beside``, a rank of this host, takes for it."""
        return self._taken[beside]
