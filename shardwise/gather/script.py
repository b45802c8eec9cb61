"""What ranks gathered in rounds, noted down so that they can gather it again without asking each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Entry", "Scripts"]

MOST_PATIENCE = 64
CROWDED, STRAYED = 1.0, 2.0
"""What a rank says of a span that has ended: there are other models, or it has left the script."""


@dataclass(frozen=True)
class Entry:
    """A round in which all ranks wanted the same.

    Attributes:
        units: what they gathered, in order.
        reductions: of the running pass, how many had begun behind it.
        ends: it was the end of a forward or backward pass.
    """

    units: tuple[int, ...]
    reductions: int
    ends: bool


@dataclass
class _Noted:
    entries: list[Entry]
    times: int = 1
    """In so many steps one behind the other it was the same."""


# [Note: Scripts instead of rounds]
# A round costs the host a message to and from each rank, and on a GPU it keeps the host from running ahead. But most
# steps are like the one before. What a round comes to is known to all of its ranks, so without a word they all know
# when a whole span (from the end of one reduced backward pass to that of the next) was made of rounds in which all
# wanted the same, and when it was the same twice, in two steps. From then on that span is played: each rank begins the
# gathers and reductions of the script, in its order, when it comes to them, and asks nobody.
#
# A rank that wants something else, or has no gradient for a reduction that the script begins, strays, alone:
# * at once it begins its part of all gathers that are left of the span, into memory that nobody reads, and has nothing
#   wait for them before its pass is over. So no peer ever waits for its gathers.
# * what it needs itself it asks of threads of the peers, as over messages ([Note: Gathers that nobody else takes part
#   in]). They answer as soon as their rank has made the update that the asking one has made, read shards on a stream
#   that waits for that update alone, and what they send goes to the device from page-locked memory: neither host nor
#   device wait for what a peer's device is doing.
# * it begins no more reductions before its pass is over. Then it begins those that the script has, with zeros for what
#   it has no gradient of, before it meets the others at the exchange at the end of the pass.
# Why this closes no cycle, whatever waits (a stream, or a host that reads a value), and whatever collectives the
# program has inside its passes: ranks that play begin their collectives in one order, so one of them is waited for only
# behind earlier ones (see [Note: Why no wait inside a pass closes a cycle]); all gathers of a rank that strayed have
# begun; its reductions begin when its pass ends; and until then it waits for reductions from before the place where it
# strayed and for threads. Of several that strayed the one that did so first waits for none of the others; the second
# for the first alone; and so on.
#
# With what all exchange at the end of the pass each rank says whether it strayed. If one has, all scripts are forgotten
# by all, and spans have to be the same twice as many times before one is played again (MOST_PATIENCE at most). A pass
# that failed is played to where the rank came that came furthest (TakingPart.realign), and the rest of its step goes in
# rounds.
#
# What is played holds for one communicator, which others use, too. In the midst of a span ranks have begun different
# numbers of its gathers, those that strayed all of them; whatever else all ranks gather there would meet another gather
# elsewhere. So before anything else (an evaluation, gathered(), a state, an update) they tell how far they are, and
# where that differs all stray, so that all have begun the same (TakingPart.align). Models that share a communicator go
# in rounds: before the first values of another one move, a span that is played ends so (TakingPart.join), and the next
# is played only where every rank has said, with what all exchange at the end of a pass, that it knows of no other model
# that is neither closed nor collected. So it does not matter when a rank closes a model, or collects one.
class Scripts:
    """Of one model over one shard group; whatever is decided here is decided alike by all of its ranks.

    Attributes:
        at: entries of the running span that this rank has played.
        strayed: this rank has left the running span's script.
        met_at: what :attr:`at` was when the ranks last had begun the same.
        crowded: whether this rank knows of other models that use the communicator.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[int | None, int], _Noted] = {}
        self._patience, self._quiet = 2, 0
        self._after: int | None = None
        self._number = 0
        self._unknown = self._alone = False
        self.crowded: Callable[[], bool] = lambda: False
        self._entries: list[Entry] = []
        self._alike = True
        self._played: list[Entry] | None = None
        self.at, self.met_at, self.strayed = 0, 0, False

    @property
    def word(self) -> float:
        """What this rank says at the end of the span."""
        return STRAYED if self.strayed else CROWDED * self.crowded()

    @property
    def playing(self) -> bool:
        """The running span goes by its script."""
        return self._played is not None

    @property
    def rest(self) -> list[Entry]:
        """What is left of the script."""
        return [] if self._played is None else self._played[self.at :]

    @property
    def owed(self) -> int:
        """Of a rank that strayed: how many reductions its peers begin by their scripts."""
        return self._played[-1].reductions if self._played and self.strayed else 0

    def note(self, units: Sequence[int], reductions: int, ends: bool, alike: bool) -> None:
        """A round of the running span."""
        self._entries.append(Entry(tuple(units), reductions, ends))
        self._alike = self._alike and alike

    def until(self, wanted: Sequence[int] | None, ready: int) -> list[Entry] | None:
        """What this rank plays now, so that it gets ``wanted`` (``None``: its pass is over). ``None``: it strays.

        Args:
            wanted: units.
            ready: reductions that it could begin, or has.
        """
        if wanted is not None and not wanted:  # it came for reductions, and may do so later as well
            return [e for e in self.rest[:1] if not (e.units or e.ends or e.reductions > ready)]
        found: list[Entry] = []
        for entry in self.rest:
            found.append(entry)
            if entry.reductions > ready:
                return None
            if entry.ends or (wanted is not None and set(wanted) <= set(entry.units)):
                return found if entry.ends == (wanted is None) else None
        return None

    def end_span(self, word: float) -> None:
        """All ranks have met at the end of a reduced backward pass.

        Args:
            word: the most that any of them has said.
        """
        key = (self._after, self._number)
        self._alone = word < CROWDED
        if word == STRAYED:
            self._noted.clear()
            self._patience, self._quiet = min(2 * self._patience, MOST_PATIENCE), 0
        elif self._played is None and self._alike and not self._unknown and self._entries:
            known = self._noted.get(key)
            same = known is not None and known.entries == self._entries
            self._noted[key] = _Noted(self._entries, known.times + 1 if known is not None and same else 1)
        elif self._played is None:
            self._noted.pop(key, None)
        else:
            self._quiet += 1
            if self._quiet >= 4 * self._patience:
                self._patience, self._quiet = max(self._patience // 2, 2), 0
        self._number += 1
        self._begin()

    def updated(self, optimizer: int | None) -> None:
        """All ranks have made an update, of one optimizer (``None``: of all)."""
        self._after, self._number, self._unknown = optimizer, 0, False
        self._begin()

    def failed(self) -> None:
        """All ranks have dropped a pass: until the next update it is not known what comes."""
        self._noted.pop((self._after, self._number), None)
        self._unknown = True
        self._begin()

    def stop(self) -> None:
        """Another model comes to the communicator, and all ranks have played as much: from here on, rounds."""
        self._alone = self._alike = False
        self._played, self.at, self.met_at = None, 0, 0

    def _begin(self) -> None:
        noted = self._noted.get((self._after, self._number)) if self._alone and not self._unknown else None
        self._played = noted.entries if noted is not None and noted.times >= self._patience else None
        self._entries, self._alike = [], True
        self.at, self.met_at, self.strayed = 0, 0, False
