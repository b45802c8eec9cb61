"""What the ranks that share chunks agree on before gathers that need all of them, where they do not go in program
order: where the plan says so (``CommPlan.same_order=False``), or under a declared capacity.

A round is one small exchange: every rank says which units it wants next, all gather the union, in one order, and a rank
that is through with its pass keeps answering until all are. So every collective that begins in a round begins on every
rank, with nothing but the host's own work in between.

Reductions may begin in rounds too (:meth:`Rounds.carry`). Where an operation that this rank has started and a peer has
not holds up more than itself, they have to. On a GPU the compute stream waits for results and the collectives wait for
the compute stream. If a rank began a reduction alone and its compute stream waited for it, to use the exchange buffer
again, what it gathers next would wait behind that; a peer on another branch needs that gather before it comes to the
reduction; and neither goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from shardwise.core.comm import Group, ModelId, Summary
from shardwise.core.memory.ledger import Ledger
from shardwise.core.shards.secondary import SecondaryShards
from shardwise.core.shards.source import ShardSource

__all__ = ["Met", "Reductions", "Rounds"]

WANTS = "what to gather"
FITS = "whether the device has room for what others gather"
SHORT = "whose device is short of memory"


@dataclass(frozen=True)
class Met:
    """What a round came to.

    Attributes:
        units: that any rank wants, in the order in which all gather them.
        alike: every rank wants the same, and none is at the end of its pass where others are not.
        running: the pass of some rank goes on.
        reductions: how many of this pass every rank can begin.
    """

    units: list[int]
    alike: bool
    running: bool
    reductions: int


class Reductions(Protocol):
    """Those of a pass, in an order that all ranks share."""

    @property
    def begun(self) -> int:
        """How many have."""

    @property
    def ready(self) -> int:
        """How many have, or could."""

    def begin(self, count: int) -> None:
        """Begin the first ``count`` that have not."""


# [Note: Why no wait inside a pass closes a cycle]
# Put all collectives of a shard group, gathers and reductions, in the order in which rounds start them; it is the same
# on every rank. Collective n begins on a rank's stream behind what its compute stream had been given when round n was
# met, so behind waits for collectives of rounds before n only. By induction all of these end on every rank, hence n
# does. Within one shard group this holds for whatever waits for them: the compute stream, the host (a page that is
# locked, memory given back with cudaFree, a module that is loaded: each may wait for the whole device) and, where
# NCCL's kernels share a GPU, the order in which they are given to it. What follows a reduction over the replicas begins
# with it, before anything else; so in each shard group what has begun over the replicas is a prefix of one order, a
# stream waits for the m-th of them only when its group has begun m, and induction over m ends there too. It does not
# for a host that waits for its whole device: with replicas, and at stages 1 and 2, where there are no rounds, that is
# left to luck where ranks are on different branches. The rest of the reductions begins at the end of the pass, when all
# ranks have met and before any of them waits. On CPU ranks see [Note: Why no wait inside backward is without end].
class Rounds:
    """Of one model over one shard group.

    Args:
        group: the ranks.
        ledger: the device's memory.
        units: how many there are.
        party: the model, among those that share ``group``.
        sources: of the chunks; what ranks keep of gathers has to be alike (see [Note: Secondary shards]).
    """

    def __init__(
        self, group: Group, ledger: Ledger, units: int, party: ModelId, sources: Sequence[ShardSource]
    ) -> None:
        self.group, self.ledger, self._units, self._party = group, ledger, units, party
        self.secondary = SecondaryShards(sources)
        self._reductions: Reductions | None = None

    def carry(self, reductions: Reductions) -> None:
        """Have reductions begin in rounds."""
        self._reductions = reductions

    def due(self) -> bool:
        """Whether this rank has reductions to begin, so that a round is worth its while without a gather."""
        return self._reductions is not None and self._reductions.ready > self._reductions.begun

    def meet(self, wanted: Sequence[int] | None) -> Met:
        """Every rank says which units it wants, ``None`` at the end of its pass.

        Raises:
            DeviceMemoryError: a rank has said that it cannot go on (:meth:`give_up`).
            PeerError: the ranks came here for different things, or one is gone.
        """
        kept = self.secondary.digest()
        found = self._say(wanted or (), [float(wanted is not None), float(self.ready), kept])
        if found.anywhere[self._units]:
            self._raise_for_short(False)
        if found.least[2] != found.most[2]:
            self.secondary.forget()
        # By number, so that all gather the union in one order, whatever each of them asked for first.
        units = [unit for unit in range(self._units) if found.anywhere[unit]]
        alike = found.flags_alike and found.least[0] == found.most[0]
        return Met(units, alike, bool(found.most[0]), int(found.least[1]))

    def _say(self, wanted: Collection[int], values: list[float], failed: bool = False) -> Summary:
        flags = [unit in wanted for unit in range(self._units)]
        return self.group.summarize(values, WANTS, self._party, [*flags, failed])

    def all_fit(self, fits: bool) -> None:
        """Every rank says whether it has room to take part in what others gather.

        Raises:
            DeviceMemoryError: one has not.
        """
        if not self.group.summarize([float(fits)], FITS, self._party).least[0]:
            self._raise_for_short(not fits)

    @property
    def ready(self) -> int:
        """How many reductions of this pass have begun, or could."""
        return self._reductions.ready if self._reductions is not None else 0

    def begin(self, reductions: int) -> None:
        """Begin those that every rank can; on every rank in the same place among gathers."""
        if self._reductions is not None:
            self._reductions.begin(reductions)

    def give_up(self) -> None:
        """This rank has too little memory to go on. Waits until the others come to what they would gather next."""
        self._say((), [0.0, 0.0, 0.0], failed=True)
        self.group.exchange([1.0], SHORT, self._party)

    def _raise_for_short(self, own: bool) -> NoReturn:
        posts = self.group.exchange([float(own)], SHORT, self._party)
        raise self.ledger.short_elsewhere(self.group.name, [rank for rank, post in enumerate(posts) if post[0]])
