"""Small messages between hosts for which places are kept, so that a meeting takes one way of the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.comm.batch import Errand, Watcher
from shardwise.comm.control import MOST_TAG, Control, apart, in_one, spread_largest, spread_sums, take_largest
from shardwise.comm.errors import PeerError
from shardwise.comm.link import Link, Message
from shardwise.comm.places import Places
from shardwise.comm.shared import SharedGroup

__all__ = ["KEPT_BYTES", "LETTER", "PLACES", "Letters"]

T = TypeVar("T")

LETTER = MOST_TAG - 1
PLACES = 4
"""Kept for each rank that this one hears: it may be a meeting ahead, and says two things in one at most."""
PLACE_WORDS, HEAD_WORDS = 512, 3
KEPT_BYTES = 8 * PLACES * PLACE_WORDS
"""Of memory for what each other host has to tell."""
FAILS = -1
"""In the place of a length: who says it has lost the others."""
HOSTS_AT_ONCE = 16
"""So many all hear each other; among more, what is summed up travels in as many steps as their number has digits."""
HALF = 1 << 32


# [Note: Meetings between hosts]
# Ranks meet a few times a step, about numbers of some hundred bytes, and what that costs between hosts is the delay of
# the wire. gloo's all-gather of N ranks passes them on N - 1 times, each of them a whole trip: it sends only when it
# has heard that there is a place. So here
# * each rank keeps places for those that it hears, and posts one again as soon as it has read it. A rank is at most
#   one meeting ahead of who hears it, so word of a free place is always there before it is needed;
# * the ranks of a host meet in their memory first. Then each tells its partners on the other hosts (Places.partner)
#   what all of its host have said, and hears the same from its partner on each. Behind that nobody is waited for.
# What is said has any length, and ranks which came for different things hear each other all the same.
# * A meeting is the errand of a thread. An interrupt ends the wait of the thread that trains, and not the meeting: this
#   rank has taken part in it, and the next one is the next one for all.
# * A place is never given up while somebody may speak: a message that finds its place dropped holds up the connection.
#   So who has lost a peer, or waited in vain, says so to all that it speaks to (FAILS) and meets nobody any more; all
#   of them hear it at once, or at their next meeting.
class Letters:
    """Of one group. Every rank calls the same methods in the same order; each returns when all have come to it.

    Args:
        control: the group's; what is said travels over its communicator.
        places: the hosts of its ranks.
        inside: the ranks of this host, where it has several; without it ``places`` says of each that it is alone.

    Raises (all methods):
        PeerError: a rank died, has failed, or did not come in time.
    """

    def __init__(self, control: Control, places: Places, inside: SharedGroup | None = None) -> None:
        self._control, self._places, self._inside = control, places, inside
        self._link = Link(control.process_group, control.name)
        self._others = [host for host in range(len(places.hosts)) if host != places.own]
        self._kept: dict[int, deque[tuple[Tensor, Message]]] = {}
        self._spoken: dict[int, list[Message]] = {}
        self._number, self._broken = 0, ""
        self._meeter = Watcher()
        self._last: Errand | None = None

    def rows(self, values: Sequence[float], what: str) -> list[list[float]]:
        """Every rank's values, as many as it has, by rank."""
        return self._meet(lambda: self._rows(values, what), what)

    def most(self, values: Sequence[float], words: Sequence[int], what: str) -> tuple[list[float], list[int]]:
        """As :meth:`Control.most`."""
        return self._meet(lambda: self._most(values, words, what), what)

    def total(self, words: Sequence[int], what: str) -> list[int]:
        """As :meth:`Control.total`."""
        return self._meet(lambda: self._total(words, what), what)

    def settle(self) -> None:
        """Return when a meeting that an interrupt has left is over, whatever became of it."""
        with suppress(PeerError):
            if self._last is not None:
                self._last.wait()

    def close(self) -> None:
        """The thread ends."""
        self._meeter.close()

    def _meet(self, meeting: Callable[[], T], what: str) -> T:
        found: list[T] = []

        def meet() -> None:
            if self._broken:
                raise PeerError(
                    f"{what} in group {self._control.name!r}: ranks of it have lost each other before, in "
                    f"{self._broken}"
                )
            self._number += 1
            try:
                found.append(meeting())
            except BaseException:
                self._broken = what
                self._fail()
                raise

        self._last = Errand(meet, self._meeter)
        self._last.wait()
        return found[0]

    # What the thread does

    def _rows(self, values: Sequence[float], what: str) -> list[list[float]]:
        here = [list(map(float, values))] if self._inside is None else self._inside.rows(values, what)
        heard = self._swap(_packed(here), self._others, self._others, what)
        rows: list[list[float]] = [[]] * self._control.size
        for host, members in enumerate(self._places.hosts):
            told = here if host == self._places.own else _unpacked(heard[host], len(members))
            for member, row in zip(members, told, strict=True):
                rows[member] = row
        return rows

    def _most(self, values: Sequence[float], words: Sequence[int], what: str) -> tuple[list[float], list[int]]:
        count, mine = len(values), in_one(values, words)
        if self._inside is not None:
            for row in self._inside.rows([*values, *_halves(words)], what):
                take_largest(mine, in_one(row[:count], _whole(row[count:])), count)
        if self._all_at_once:
            for theirs in self._swap(mine, self._others, self._others, what).values():
                take_largest(mine, theirs, count)
        else:
            spread_largest(mine, count, len(self._places.hosts), partial(self._shifted, what=what))
        return apart(mine, count)

    def _total(self, words: Sequence[int], what: str) -> list[int]:
        rows = [words] if self._inside is None else [_whole(row) for row in self._inside.rows(_halves(words), what)]
        own = torch.tensor([sum(column) for column in zip(*rows, strict=True)], dtype=torch.int64, device="cpu")
        if self._all_at_once:
            heard = self._swap(own.view(torch.float64), self._others, self._others, what).values()
            found = sum((theirs.view(torch.int64) for theirs in heard), own)
        else:
            found = spread_sums(own, len(self._places.hosts), partial(self._shifted, what=what))
        result: list[int] = found.tolist()
        return result

    @property
    def _all_at_once(self) -> bool:
        return len(self._places.hosts) <= HOSTS_AT_ONCE

    def _shifted(self, mine: Tensor, by: int, what: str) -> Tensor:
        """What the host ``by`` before this one has where this one has ``mine``."""
        own, hosts = self._places.own, len(self._places.hosts)
        (theirs,) = self._swap(mine.view(torch.float64), [(own + by) % hosts], [(own - by) % hosts], what).values()
        return theirs.view(mine.dtype)

    def _swap(self, mine: Tensor, to: Iterable[int], of: Iterable[int], what: str) -> dict[int, Tensor]:
        """Tell some hosts numbers of this one, and hear what others have to tell, by host."""
        places, rank = self._places, self._control.rank
        peers = self._hearers(to)
        heard = {host: places.partner(host, rank) for host in of}
        for peer in heard.values():
            self._keep(peer, what)
        try:
            for part in _parts(mine, self._number):
                for peer in peers:
                    self._spoken.setdefault(peer, []).append(self._link.send_aside(part, peer, LETTER, what))
        except PeerError as error:
            raise self._control.lost(what, error) from error
        told = {host: self._hear(peer, what) for host, peer in heard.items()}
        for peer in peers:  # who hears this rank is here, too, or was
            for message in self._spoken[peer]:
                self._wait(message, what)
            self._spoken[peer].clear()
        return told

    def _hearers(self, hosts: Iterable[int]) -> list[int]:
        """The ranks of these hosts that hear this one for its host."""
        places, rank = self._places, self._control.rank
        return [m for host in hosts for m in places.hosts[host] if places.partner(places.own, m) == rank]

    def _wait(self, message: Message, what: str) -> None:
        try:
            message.wait()
        except PeerError as error:
            raise self._control.lost(what, error) from error

    def _keep(self, peer: int, what: str) -> None:
        kept = self._kept.setdefault(peer, deque())
        try:
            while len(kept) < PLACES:
                self._post(peer, torch.zeros(PLACE_WORDS, dtype=torch.float64, device="cpu"), what)
        except PeerError as error:
            raise self._control.lost(what, error) from error

    def _post(self, peer: int, place: Tensor, what: str) -> None:
        self._kept[peer].append((place, self._link.receive_aside(place, peer, LETTER, what)))

    def _hear(self, peer: int, what: str) -> Tensor:
        part = self._take_part(peer, what)
        parts, missing = [part[HEAD_WORDS:]], int(part[1]) + HEAD_WORDS - part.numel()
        while missing > 0:
            parts.append(self._take_part(peer, what)[HEAD_WORDS:])
            missing -= parts[-1].numel()
        return torch.cat(parts)

    def _take_part(self, peer: int, what: str) -> Tensor:
        """What is in the oldest place, which is posted again: its head, and as much of the rest as it holds."""
        if not self._kept[peer]:
            self._keep(peer, what)
        place, message = self._kept[peer][0]
        self._wait(message, what)
        self._kept[peer].popleft()
        number, numel, at = map(int, place[:HEAD_WORDS].tolist())
        if numel == FAILS or number != self._number:
            told = (
                f"rank {peer} has lost the others in meeting {number}"
                if numel == FAILS
                else (f"rank {peer} is at meeting {number} and rank {self._control.rank} at {self._number}")
            )
            raise self._control.lost(what, PeerError(told))
        part = place[: HEAD_WORDS + min(numel - at, PLACE_WORDS - HEAD_WORDS)].clone()
        with suppress(PeerError):  # who has left behind what was said is missed by who has to hear more
            self._post(peer, place, what)
        return part

    def _fail(self) -> None:
        """Tell the ranks of this host, and all that this one speaks to, that it meets nobody any more."""
        if self._inside is not None:
            self._inside.fail()
        told = torch.tensor([self._number, FAILS, 0], dtype=torch.float64, device="cpu")
        for peer in {*self._spoken, *self._hearers(self._others if self._all_at_once else ())}:
            with suppress(PeerError):
                sent = self._link.send_aside(told, peer, LETTER, "what is told")
                self._spoken.setdefault(peer, []).append(sent)


def _parts(whole: Tensor, number: int) -> list[Tensor]:
    """What fits a place each, behind the number of the meeting, the length of all of it, and where this begins."""
    numel, room = whole.numel(), PLACE_WORDS - HEAD_WORDS
    heads = [
        torch.tensor([number, numel, at], dtype=torch.float64, device="cpu") for at in range(0, max(numel, 1), room)
    ]
    return [torch.cat([head, whole[at * room : (at + 1) * room]]) for at, head in enumerate(heads)]


def _packed(rows: Sequence[Sequence[float]]) -> Tensor:
    """Rows of any lengths as one: the lengths, and then the rows."""
    return torch.tensor(
        [float(len(row)) for row in rows] + [v for row in rows for v in row], dtype=torch.float64, device="cpu"
    )


def _unpacked(words: Tensor, count: int) -> list[list[float]]:
    """So many rows, of which :func:`_packed` made ``words``."""
    told: list[float] = words.tolist()
    rows, at = list[list[float]](), count
    for length in map(int, told[:count]):
        rows.append(told[at : at + length])
        at += length
    return rows


def _halves(words: Sequence[int]) -> list[float]:
    """Whole numbers of 63 bits and a sign as such that are exact in fp64: the upper ones, then the lower ones."""
    return [float(word >> 32) for word in words] + [float(word % HALF) for word in words]


def _whole(halves: Sequence[float]) -> list[int]:
    """What :func:`_halves` was given."""
    count = len(halves) // 2
    return [(int(upper) << 32) + int(lower) for upper, lower in zip(halves[:count], halves[count:], strict=True)]
