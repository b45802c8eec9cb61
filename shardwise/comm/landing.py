"""Where shards of other hosts come down: memory that the ranks of a host map, so that each comes once for all."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.errors import PeerError
from shardwise.comm.joint import tensor_in
from shardwise.comm.mapping import LINE_BYTES, LINE_WORDS
from shardwise.comm.shared import SharedGroup

__all__ = ["HERE", "LOST", "UNDER_WAY", "Entry", "Landing"]

ENTRIES = 256
NAP_FIRST_S, NAP_MAX_S = 20e-6, 200e-6
UNDER_WAY, HERE, LOST = range(3)

# Words of the table: how many entries were ever made, the oldest that is kept, and bytes ever given out; then, for each
# place of an entry, what it is of, where it begins, its state; then, for each rank, how many of its gathers have it
# pinned.
NEXT, OLDEST, GIVEN = (LINE_WORDS + word for word in range(3))
KEYS, STARTS, STATES, FETCHERS, PINS = (2 * LINE_WORDS + ENTRIES * column for column in range(5))


@dataclass(frozen=True)
class Entry:
    """What is there, or under way, of one shard's whole.

    Attributes:
        number: among all that were ever made.
        fetcher: the rank of the host that brings it.
        at: the bytes.
    """

    number: int
    fetcher: int
    at: Tensor


# [Note: A host's landing]
# Where gathers are asked for, the ranks of a host would each ask for the same shards of the other hosts. So what comes
# lands in memory that all of them map, in a ring: who needs a shard first makes an entry, asks the other hosts for
# their parts, and has them arrive there; who needs it later finds the entry, and copies once it is here.
# * Nothing waits for a rank's turn. Who needs a shard alone brings it alone. What is under way is waited for by a
#   thread of the rank that asked (``bringer``), which waits for messages of threads that answer whatever their rank
#   does ([Note: Gathers that nobody else takes part in]) and for nothing else; it marks the entry HERE or LOST. Who
#   finds it LOST, or its fetcher gone before it was either, asks for itself. The table is changed under a lock that is
#   held for a look at it, in which nothing is waited for; the system takes it back from a process that dies. So no wait
#   of this kind is part of a circle.
# * Nothing is read too early: an entry is marked when all its parts have arrived; who brings it asks behind the
#   update. Nothing is read too late: what an entry is of says between which two fences it was asked for ([Note:
#   Fences]), all ranks count them alike, and older ones are not found. Before a rank comes to the next fence its own
#   gathers have arrived and are copied (reads_arrive), so none writes there later.
# * Memory is used again from its oldest end, and nobody waits for that either: what a rank still has to copy it has
#   pinned, and where the ring has no room a gather goes past it, into the rank's own array. That is right and costs
#   bytes: ranks of a host that are further apart than the ring is long bring the same shard twice. A pin that an
#   interrupt left behind goes at the fence.
class Landing:
    """Of one host. Collective over its ranks to make; the other methods are each rank's own affair.

    Args:
        inside: the ranks of the host.
        nbytes: of the ring, the same on all of them.

    Raises:
        MappingError: the memory cannot be had, on every rank of the host.
    """

    def __init__(self, inside: SharedGroup, nbytes: int) -> None:
        self._inside, self.nbytes = inside, nbytes
        table = -(-8 * (PINS + inside.size * ENTRIES) // mmap.PAGESIZE) * mmap.PAGESIZE
        segment, self._fd = inside.common(table + nbytes)
        weakref.finalize(self, os.close, self._fd)
        self._words = memoryview(segment)[:table].cast("q")
        self._ring = tensor_in(segment, table, nbytes, torch.uint8)
        self._pins, self._pinning = PINS + inside.rank * ENTRIES, threading.Lock()
        """Where this rank's are, and who changes one: gathers end in several threads."""

    def enter(self, key: int, nbytes: int) -> tuple[Entry | None, bool]:
        """The entry of ``key`` (a number above 0) with ``nbytes``, pinned, and whether this rank has to bring it;
        ``None`` where there is no room for one."""
        words = self._words
        with self._locked():
            keys = words[KEYS : KEYS + ENTRIES].tolist()
            if key in keys:
                place = keys.index(key)
                if words[STATES + place] != LOST:
                    self._pin(place, 1)
                    return self._entry(place, nbytes), False
                words[KEYS + place] = 0
            start = self._room(-(-nbytes // LINE_BYTES) * LINE_BYTES)
            if start is None:
                return None, False
            number = words[NEXT]
            place = number % ENTRIES
            words[KEYS + place], words[STARTS + place], words[STATES + place] = key, start, UNDER_WAY
            words[FETCHERS + place] = self._inside.rank
            self._pin(place, 1)
            words[NEXT] = number + 1
            return self._entry(place, nbytes), True

    def _entry(self, place: int, nbytes: int) -> Entry:
        words = self._words
        number = words[NEXT] - 1 - (words[NEXT] - 1 - place) % ENTRIES
        begin = words[STARTS + place] % self.nbytes
        return Entry(number, words[FETCHERS + place], self._ring[begin : begin + nbytes])

    def _room(self, nbytes: int) -> int | None:
        """Where so many bytes begin that nobody has to copy, counting all that were ever given out."""
        words = self._words
        start = words[GIVEN]
        if start % self.nbytes + nbytes > self.nbytes:  # not in two pieces
            start += self.nbytes - start % self.nbytes
        oldest, next_ = words[OLDEST], words[NEXT]
        while nbytes <= self.nbytes and oldest < next_:
            place = oldest % ENTRIES
            if next_ - oldest < ENTRIES and start + nbytes - words[STARTS + place] <= self.nbytes:
                break
            if any(words[PINS + rank * ENTRIES + place] for rank in range(self._inside.size)):
                return None
            words[KEYS + place] = 0
            oldest += 1
            words[OLDEST] = oldest
        if nbytes > self.nbytes:
            return None
        words[GIVEN] = start + nbytes
        return int(start)

    def state(self, entry: Entry) -> int:
        """Of one that this rank has pinned."""
        return int(self._words[STATES + entry.number % ENTRIES])

    def mark(self, entry: Entry, state: int) -> None:
        """By its fetcher; what has arrived is visible to whoever sees it."""
        self._words[STATES + entry.number % ENTRIES] = state

    def unpin(self, entry: Entry) -> None:
        """A gather of this rank has copied it, or needs it no more."""
        self._pin(entry.number % ENTRIES, -1)

    def unpin_all(self) -> None:
        """This rank has copied all that it needs."""
        with self._pinning:
            self._words[self._pins : self._pins + ENTRIES] = memoryview(bytes(8 * ENTRIES)).cast("q")

    def _pin(self, place: int, change: int) -> None:
        with self._pinning:
            self._words[self._pins + place] = max(self._words[self._pins + place] + change, 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        nap, began = NAP_FIRST_S, time.monotonic()
        while not self._tries():
            time.sleep(nap)
            nap = min(2 * nap, NAP_MAX_S)
            if time.monotonic() - began > self._inside.timeout_s:
                raise PeerError(
                    f"a look at what has come to the host, of group {self._inside.name!r}: another rank of it has held "
                    f"the lock for {self._inside.timeout_s:g} s; is it stopped?"
                )
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _tries(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
