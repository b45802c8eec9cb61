"""Threads send peers this rank's shards when they ask, so that gathers need nobody else's taking part."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from shardwise.comm.errors import PeerError
from shardwise.comm.group import Buffer
from shardwise.comm.link import TAG_LIMIT, Link, Message

__all__ = ["ASK", "Served", "Serving", "Written", "leave_at_exit"]

# Above the tags of operations that all ranks start in one order.
ASK = TAG_LIMIT
ANSWERS = 1 << 20  # tags of answers; no two gathers that are so many apart are under way together
# What a request has where others have a buffer's number.
RELEASES, LEAVES, LEAVES_LAST, ENDS, FAREWELL = -1, -2, -3, -4, -5
MOST_BUFFERS = 1 << 24
OPEN, MOST_OPEN, LEAST_OPEN = 64, 4096, 4
"""Requests that a peer can send before it hears that one was taken: so many, fewer where there are many peers (so many
of all together), but not fewer than the last."""
Fetch = Callable[[Tensor], Tensor]
IDLE = timedelta(days=3650)
"""A peer that asks for nothing is no failure; that it is gone shows by its connection."""
END_S = 2.0
"""Seconds that a process which ends stays for peers that have not left: from then on, or from what one last asked."""
SOON_S = 0.2
"""Seconds for a thread to end by itself, when all of its peers have left."""
KEPT_WORDS = 32  # so many that were sent without waiting are kept until they have surely arrived


class Written:
    """How many updates of what is served this rank is through with; threads that answer wait for one."""

    def __init__(self) -> None:
        self._updates, self._changed = 0, threading.Condition()

    @property
    def updates(self) -> int:
        """So far."""
        return self._updates

    def through(self, updates: int) -> None:
        """With so many."""
        with self._changed:
            self._updates = updates
            self._changed.notify_all()

    def wait_for(self, updates: int) -> None:
        """Return when it is through with so many."""
        with self._changed:
            self._changed.wait_for(lambda: self._updates >= updates)


# [Note: Gathers that nobody else takes part in]
# Where memory is not mapped a gather needs the peers. If it needed their main threads, all ranks would have to gather
# the same units in one order: they would agree on each gather first, and a rank that left the order (another branch, a
# unit that something still holds) would wait for peers that wait for it, in whatever collective the user's own modules
# make. So a rank asks: it posts where each peer's part goes, and sends each a request; a thread of the peer sends that
# part. What is asked and sent has tags of its own, which the one who asks chooses.
# * Nothing closes a cycle: who gathers waits for threads that wait for messages, whatever their rank is doing, and for
#   the end of an update that it is in the midst of, and take no lock of the engine ([Note: Which thread touches what]).
#   A peer that has failed, left its pass or has not come to it answers too; that the ranks have lost each other shows
#   where they meet, as over mapped memory.
# * Values are those of the step: shards are written between two fences only ([Note: Fences]). Before the first, a real
#   meeting however many units there are, this rank's gathers have arrived (GlooGroup.fence). Behind the second nobody
#   waits: a request says how many updates its rank is through with, and who answers does so behind as many of its own.
#   It comes to that by itself: all have met before any began, and who asks has taken part in what they met for since.
# * A thread for each peer answers fastest, and takes as many threads as there are peers: it is for ranks that gather so
#   whenever they gather. Where asking is what a rank does that is in none of the collectives of the others, one thread
#   for all of them will do, among any number of ranks (together): it takes requests of whoever asks first, at a trip
#   more for each, and answers one by one. That a peer's process is gone does not end it.
# * Requests do not wait for each other: gloo sends a message when it has heard that there is a place for it. So there
#   are places for many requests (OPEN). With one, each would wait until word of the next place has come, and no two be
#   on the wire. What is left of them when a thread ends is dropped then, and nothing may come for it any more: who has
#   said that it leaves says nothing after that but FAREWELL.
# * Nobody is left without a part: mapped memory stays as long as one rank maps it, and so does what is served. A rank
#   that is through with a model (close(), the collector) tells the peers that it will not ask any more (RELEASES); the
#   memory goes when all of them have said so. A rank that is through with the group tells that too (LEAVES), and its
#   threads go on until the peers have.
# * Threads end where both sides have left. Who leaves second, as it knows, says so (LEAVES_LAST), and hears FAREWELL,
#   since its thread has nothing else to wait for. A process that ends while a peer has not left stays a moment, and
#   longer while that one still asks, then says that it ENDS: no thread may wait inside gloo while Python finalizes,
#   which can abort the process.
class Serving:
    """Of one rank, to the others of its group.

    Args:
        link: over which requests and answers travel.
        peers: the other ranks.
        written: what those who ask "behind" so many updates wait for.
        fetch: gives the values of a shard in the host's memory; called by the threads that answer.
        together: one thread answers all peers.
    """

    def __init__(
        self,
        link: Link,
        peers: Iterable[int],
        written: Written,
        fetch: Fetch = lambda shard: shard,
        together: bool = False,
    ) -> None:
        self._link, self._count, self._sets = link, 0, 0
        self._ends = [_End(link, peer) for peer in peers]
        if together:
            _Answering(link, self._ends, written, fetch, OPEN)
        else:
            places = max(min(OPEN, MOST_OPEN // max(len(self._ends), 1)), LEAST_OPEN)
            for end in self._ends:
                _Answering(link, [end], written, fetch, places)
        self._leave = weakref.finalize(self, _leave_all, self._ends)
        self._leave.atexit = False
        _at_exit(self._ends)

    def serve(self, shards: Sequence[Buffer]) -> Served:
        """From now on peers may ask for them; all ranks serve theirs in one order."""
        self._sets += 1
        memory = {shard.number: shard.local for shard in shards}
        for end in self._ends:
            end.served[self._sets] = memory
            end.forget_words()
        return Served(self._sets, self._ends)

    def ask(
        self,
        shard: Buffer,
        part_of: Callable[[int], Tensor],
        what: str,
        of: Container[int] | None = None,
        behind: int = 0,
    ) -> list[Message]:
        """Each peer's part of what ``shard`` is a part of, into ``part_of(peer)``.

        Args:
            shard: this rank's part.
            part_of: where what comes goes.
            what: for errors.
            of: which peers; ``None``: all.
            behind: so many updates of the peer.

        Raises:
            PeerError: a peer's process has ended.
        """
        self._count = (self._count + 1) % ANSWERS
        tag, asked = ASK + 1 + self._count, list[Message]()
        try:
            for end in self._ends:
                if of is not None and end.peer not in of:
                    continue
                if end.gone:
                    raise PeerError(f"{what}: the process of rank {end.peer} has ended; look at what it said last")
                part = self._link.receive(part_of(end.peer), end.peer, tag, what)
                request = torch.tensor([shard.number + behind * MOST_BUFFERS, tag], device="cpu")
                asked += [self._link.send(request, end.peer, ASK, what), part]
        except BaseException:  # what was asked for comes, and must not be written into an array with another use
            for message in asked:
                with suppress(PeerError):
                    message.wait()
            raise
        return asked

    def close(self) -> None:
        """This rank asks for nothing any more; its threads answer until the peers say the same. Again is as good."""
        self._leave()


class Served:
    """Some shards that peers may ask for. When it is dropped, the peers hear that this rank will not ask for them."""

    def __init__(self, number: int, ends: Sequence[_End]) -> None:
        self._drop = weakref.finalize(self, _release, number, ends)
        self._drop.atexit = False


class _End:
    """What this rank and one peer have told each other.

    Attributes:
        served: what the peer may still ask for, by the number of its set and of the buffer.
        gone: the peer's process has ended.
        asked_at: when it last asked, in seconds of the monotonic clock.
        over: nothing comes of it any more.
        thread: answers it.
    """

    def __init__(self, link: Link, peer: int) -> None:
        self.link, self.peer = link, peer
        self.served: dict[int, dict[int, Tensor]] = {}
        self.gone, self.asked_at, self.over = False, 0.0, threading.Event()
        self._left: dict[str, object] = {}
        self._words: deque[Message] = deque()
        self.thread: threading.Thread

    @property
    def answers(self) -> bool:
        """Whether the peer may still be told something. No thread is alive in a forked child."""
        return self.thread.is_alive() and not self.over.is_set()

    def leave(self) -> None:
        """This rank asks for nothing any more. Again is as good."""
        mine = object()
        if self._left.setdefault("told", mine) is mine and self.answers:
            self.say(LEAVES if self.leaves_first("own") else LEAVES_LAST)

    @property
    def has_left(self) -> bool:
        """Whether this rank has said that it asks for nothing any more."""
        return "told" in self._left

    def leaves_first(self, who: str) -> bool:
        """Whether ``who`` ("own", "peer") leaves first; one operation of a dictionary, since two threads ask."""
        return self._left.setdefault("first", who) == who

    def say(self, word: int, number: int = 0) -> None:
        """Nothing waits: each rank collects garbage when it likes."""
        try:
            message = self.link.send_aside(torch.tensor([word, number], device="cpu"), self.peer, ASK, "what is told")
            self._words.append(message)  # dropped before it has arrived, it would never
        except Exception:  # the peer is gone
            self.over.set()

    def forget_words(self) -> None:
        """Let go of what was said long ago."""
        while len(self._words) > KEPT_WORDS:
            with suppress(PeerError):
                self._words.popleft().wait()


class _Answering:
    """A thread that answers some peers.

    Args:
        link: to them.
        ends: of each.
        written, fetch: see :class:`Serving`.
        places: for requests; of each peer where it is one, otherwise of whoever asks first.
    """

    def __init__(self, link: Link, ends: Sequence[_End], written: Written, fetch: Fetch, places: int) -> None:
        self._link, self._written, self._fetch, self._open = link, written, fetch, places
        self._ends, self._lost = {end.peer: end for end in ends}, 0
        name = f"shardwise-serving-{ends[0].peer if len(ends) == 1 else 'all'}"
        thread = threading.Thread(target=self._run, daemon=True, name=name)
        for end in ends:
            end.thread = thread
        thread.start()

    def _run(self) -> None:
        ends, places = dict(self._ends), deque[tuple[Tensor, Message]]()
        with suppress(Exception):  # the peer or the communicator is gone: who needs them is told
            while ends:
                while len(places) < self._open:
                    asked = torch.zeros(2, dtype=torch.int64, device="cpu")
                    places.append((asked, self._receive(asked)))
                asked, message = places.popleft()
                # Of some that end at once a peer's last word comes behind its goodbye.
                end = ends.get(message.source) if self._arrives(message) else None
                if end is not None and not self._hears_more(end, *asked.tolist()):
                    _close(ends.pop(end.peer))
        places.clear()
        for end in self._ends.values():
            _close(end)

    def _arrives(self, message: Message) -> bool:
        """Whether what is waited for has come. Who sent it may be gone: of several peers the others are there."""
        try:
            message.wait(IDLE)
        except PeerError:
            self._lost += 1
            if self._lost >= len(self._ends):
                raise
            return False
        return True

    def _hears_more(self, end: _End, word: int, number: int) -> bool:
        """See :meth:`_hear`, whatever goes wrong with what one peer has asked for."""
        try:
            return self._hear(end, word, number)
        except PeerError:  # it does not take it
            return True
        except Exception:  # it cannot be read
            return False

    def _receive(self, asked: Tensor) -> Message:
        if len(self._ends) > 1:
            return self._link.receive_any(asked, ASK, "a request for a shard")
        (peer,) = self._ends
        return self._link.receive_aside(asked, peer, ASK, "a request for a shard")

    def _hear(self, end: _End, word: int, number: int) -> bool:
        """What the peer has said; whether it may say more."""
        if word >= 0:
            end.asked_at = time.monotonic()
            self._send(end, word, number)
        elif word == RELEASES:
            end.served.pop(number, None)
        elif word == LEAVES and end.leaves_first("peer"):
            end.served.clear()
        else:
            end.gone = word == ENDS
            if word in (LEAVES_LAST, ENDS):
                end.say(FAREWELL)
            return False
        return True

    def _send(self, end: _End, word: int, tag: int) -> None:
        updates, buffer = divmod(word, MOST_BUFFERS)
        self._written.wait_for(updates)  # before that it may not be served yet
        for memory in list(end.served.values()):
            if buffer in memory:
                shard = self._fetch(memory[buffer])
                self._link.send_aside(shard, end.peer, tag, f"the shard of buffer {buffer}").wait()


def _close(end: _End) -> None:
    end.served.clear()
    end.over.set()


def _release(number: int, ends: Sequence[_End]) -> None:
    for end in ends:
        if end.answers and not end.has_left:
            end.say(RELEASES, number)


def _leave_all(ends: Sequence[_End]) -> None:
    for end in ends:
        end.leave()


_open: list[weakref.ref[_End]] = []


def _at_exit(ends: Sequence[_End]) -> None:
    _open[:] = [ref for ref in _open if (end := ref()) is not None and end.answers]
    _open.extend(map(weakref.ref, ends))


def leave_at_exit() -> None:
    """The process ends: no thread may wait inside gloo then. See [Note: Gathers that nobody else takes part in]."""
    ends = [end for ref in _open if (end := ref()) is not None]
    _leave_all(ends)
    began = time.monotonic()
    for end in ends:
        while end.answers and (rest := max(began, end.asked_at) + END_S - time.monotonic()) > 0:
            end.over.wait(rest)
    for end in ends:
        if end.answers:
            end.say(ENDS)
    last = time.monotonic() + END_S
    for end in ends:
        end.over.wait(max(last - time.monotonic(), 0.0))
    for thread in {end.thread for end in ends}:
        thread.join(SOON_S)  # one whose peers have all said goodbye ends by itself
