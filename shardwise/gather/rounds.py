"""What the ranks that share chunks agree on before gathers that need all of them.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.chunk.secondary import SecondaryShards
from shardwise.chunk.source import ShardSource
from shardwise.comm import Group, Party
from shardwise.memory.ledger import Ledger

__all__ = ["Met", "Reductions", "Rounds"]

# No unit has a negative number. FAILED stands in every place, so that it is found in a post of any width.
NO_UNIT = -1.0
FAILED = -2.0
UNITS = 3  # where they begin in a post
WANTS = "what to gather"
FITS = "whether the device has room for what others gather"


@dataclass(frozen=True)
class Met:
    """What a round came to.

    Attributes:
        units: that any rank wants, in the order in which all gather them.
        alike: every rank wants the same.
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
        width: how many units a rank may want in one round.
        party: the model, among those that share ``group``.
        sources: of the chunks; what ranks keep of gathers has to be alike (see [Note: Secondary shards]).
    """

    def __init__(self, group: Group, ledger: Ledger, width: int, party: Party, sources: Sequence[ShardSource]) -> None:
        self._group, self._ledger, self._width, self._party = group, ledger, width, party
        self._secondary = SecondaryShards(sources)
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
        ready = self._reductions.ready if self._reductions is not None else 0
        units = [float(u) for u in wanted or ()]
        kept = self._secondary.digest()
        mine = [float(wanted is not None), float(ready), kept, *units, *[NO_UNIT] * (self._width - len(units))]
        posts = self._group.exchange(mine, WANTS, self._party)
        self._raise_for([rank for rank, post in enumerate(posts) if FAILED in post])
        if any(post[2] != kept for post in posts):
            self._secondary.forget()
        found = {int(unit) for post in posts for unit in post[UNITS:] if unit != NO_UNIT}
        alike = len({frozenset(post[UNITS:]) for post in posts}) == 1
        # Sorted, so that all gather the union in one order, whatever each of them asked for first.
        return Met(sorted(found), alike, any(post[0] for post in posts), int(min(post[1] for post in posts)))

    def all_fit(self, fits: bool) -> None:
        """Every rank says whether it has room to take part in what others gather.

        Raises:
            DeviceMemoryError: one has not.
        """
        posts = self._group.exchange([float(fits)], FITS, self._party)
        self._raise_for([rank for rank, post in enumerate(posts) if not post[0]])

    def begin(self, met: Met) -> None:
        """Begin the reductions that every rank can; on every rank in the same place among gathers."""
        if self._reductions is not None:
            self._reductions.begin(met.reductions)

    def give_up(self) -> None:
        """This rank has too little memory to go on. Waits until the others come to what they would gather next."""
        self._group.exchange([FAILED] * (UNITS + self._width), WANTS, self._party)

    def _raise_for(self, short: list[int]) -> None:
        if short:
            raise self._ledger.short_elsewhere(self._group.name, short)
