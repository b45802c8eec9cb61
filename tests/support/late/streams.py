"""Streams of the late device: queues of work that runs on demand, and the order between works."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

import shardwise

Clock = dict[int, int]
"""How many works of each stream (by its number) have been waited for."""
OWN = (
    f"{Path(__file__).parent}{os.sep}",
    str(Path(shardwise.__file__).parent / "core" / "base" / "device"),
    str(Path(shardwise.__file__).parent / "core" / "base" / "torch_internals.py"),
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
)
"""Beginnings of the names of files that belong to torch or to the simulated device."""


def caller() -> str:
    """Return the caller's place: the innermost line that is in neither torch nor the simulated device."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(OWN):
        return "autograd"
    return f"{'/'.join(frame.f_code.co_filename.rsplit('/', 2)[-2:])}:{frame.f_lineno}"


@dataclass(frozen=True)
class Access:
    """Bytes that a work reads or writes.

    Attributes:
        region: the memory.
        start, stop: range of bytes.
        write: whether they change.
    """

    region: History
    start: int
    stop: int
    write: bool


@dataclass(eq=False)
class Work:
    """A work in a stream's queue, which runs later.

    Attributes:
        stream, number: its stream, and its position there.
        run: function that does it.
        what: name for messages.
        where: line that queued it.
        waits: ends of other streams' works that precede it.
        accesses: the memory that it uses.
        poll: for a work that takes time of its own: ``run`` starts it, and it is done when this returns True.
    """

    stream: Stream
    number: int
    run: Callable[[], None]
    what: str
    where: str
    waits: tuple[tuple[Stream, int], ...]
    accesses: tuple[Access, ...]
    poll: Callable[[], bool] | None = None
    begun: bool = False

    def __str__(self) -> str:
        return f"{self.what} on {self.stream.name} from {self.where}"


@dataclass(frozen=True)
class Race:
    """Two works that use the same bytes without one waiting for the other."""

    first: str
    second: str
    memory: str

    def __str__(self) -> str:
        return f"{self.memory}: {self.second} does not wait for {self.first}"


class History:
    """The uses of one piece of memory that matter for the order of later ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._past: list[tuple[int, int, bool, Work]] = []

    def add(self, access: Access, work: Work, clock: Clock) -> Race | None:
        """Return a race with an earlier use, if there is one."""
        found: Race | None = None
        kept = []
        for start, stop, write, earlier in self._past:
            apart = stop <= access.start or access.stop <= start
            ordered = clock.get(earlier.stream.index, 0) >= earlier.number
            if not apart and not ordered and (write or access.write):
                found = found or Race(str(earlier), str(work), self.name)
            inside = access.start <= start and stop <= access.stop
            replaced = inside and (access.write or (not write and earlier.stream is work.stream))
            if not replaced:
                kept.append((start, stop, write, earlier))
        kept.append((access.start, access.stop, access.write, work))
        self._past = kept
        return found

    def forget(self) -> None:
        """Forget all uses: the host has seen that they are done, and gives the memory to a new owner."""
        self._past = []


class Event:
    """The works in a stream's queue when the event was recorded."""

    def __init__(self, stream: Stream, number: int, clock: Clock) -> None:
        self.stream, self.number, self.clock = stream, number, clock

    def query(self) -> bool:
        """Return whether they are done: only after some queries."""
        return self.stream.schedule.asked(self)

    def synchronize(self) -> None:
        """Wait on the host for them."""
        self.stream.schedule.host_waits(self)


class Stream:
    """One queue. The works of a stream run in order."""

    def __init__(self, schedule: Schedule, index: int, name: str) -> None:
        self.schedule, self.index, self.name = schedule, index, name
        self.queue: deque[Work] = deque()
        self.given = self.done = 0
        self.clock: Clock = {}
        self._waits: list[tuple[Stream, int]] = []

    def __repr__(self) -> str:
        return f"<{self.name}: {self.done} of {self.given} done>"

    def give(
        self, run: Callable[[], None], what: str, accesses: Iterable[Access], poll: Callable[[], bool] | None = None
    ) -> Work:
        """Queue a work after everything that the stream waits for."""
        self.given += 1
        self.clock[self.index] = self.given
        _join(self.clock, self.schedule.host_clock)
        self.schedule.last_given = time.monotonic()
        work = Work(self, self.given, run, what, caller(), tuple(self._waits), tuple(accesses), poll)
        self._waits.clear()
        self.queue.append(work)
        for access in work.accesses:
            race = access.region.add(access, work, self.clock)
            if race is not None:
                self.schedule.races.append(race)
        return work

    def record_event(self, event: Any = None) -> Event:
        """Return an event that completes when the stream has done its present work."""
        with self.schedule.lock:
            if self._waits:
                self.give(_nothing, "a wait", ())
            return Event(self, self.given, dict(self.clock))

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for the event."""
        with self.schedule.lock:
            if event.stream is not self:
                self._waits.append((event.stream, event.number))
                _join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """Let later work of this stream wait for all present work of the other."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Wait on the host for all present work."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return whether all work is done."""
        return self.record_event().query()


def _nothing() -> None:
    pass


def _join(clock: Clock, other: Clock) -> None:
    for index, number in other.items():
        if clock.get(index, 0) < number:
            clock[index] = number


@dataclass
class Schedule:
    """The order in which works run.

    Attributes:
        seed: of the choices. ``seed % 4`` is the kind: 0: everything as late as possible; 1: side streams as early as
            possible, before the main stream; 2: the main stream at once, side streams as late as possible; 3: any
            stream at any time.
        lock: held while anything here changes.
        host_waits_at: thread and line of each wait of a host: for an event, a stream, a value, a copy that blocks.
    """

    seed: int
    lock: Any
    streams: list[Stream] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    host_clock: Clock = field(default_factory=dict)
    host_waits_at: list[tuple[str, str]] = field(default_factory=list)
    idle: Callable[[], None] = _nothing
    last_given: float = 0.0
    _questions: int = 0
    _busy: bool = False

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def new_stream(self, name: str) -> Stream:
        """Return a new stream."""
        with self.lock:
            self.streams.append(Stream(self, len(self.streams), f"{name} {len(self.streams)}"))
            return self.streams[-1]

    # ---- waits of the host

    def host_waits(self, event: Event) -> None:
        """Return when an event has completed."""
        with self.lock:
            self.host_waits_at.append((threading.current_thread().name, caller()))
            self.run_until(event.stream, event.number)
            _join(self.host_clock, event.clock)

    def asked(self, event: Event) -> bool:
        """Return whether an event has completed. Every third query advances its stream, so that polling ends."""
        with self.lock:
            self._questions += 1
            if event.stream.done < event.number and self._questions % 3 == 0:
                self._step(event.stream, wait=False)
            if event.stream.done < event.number:
                return False
            _join(self.host_clock, event.clock)
            return True

    def run_all(self) -> None:
        """Wait on the host for all streams, in an order that the seed chooses."""
        with self.lock:
            for stream in self._random.sample(self.streams, len(self.streams)):
                self.host_waits(stream.record_event())

    # ---- running works

    def run_until(self, stream: Stream, number: int) -> None:
        """Run the works of a stream up to that one, and those that they wait for."""
        while stream.done < number:
            if not self._step(stream, wait=True):
                self.idle()

    def _step(self, stream: Stream, wait: bool) -> bool:
        """Run a stream's next work. Return False if it waits for another stream (unless ``wait``), or is still
        running."""
        work = stream.queue[0]
        for other, number in work.waits:
            if other.done < number:
                if not wait:
                    return False
                self.run_until(other, number)
        if stream.done >= work.number:
            return True  # running what it waited for came back to this stream
        if not work.begun:
            work.begun = True
            work.run()
        if work.poll is not None and not work.poll():
            return False
        if stream.queue and stream.queue[0] is work:
            stream.queue.popleft()
            stream.done = work.number
        return True

    def after_giving(self) -> None:
        """Run what the seed chooses after a work was queued, although nothing waits for it."""
        if self._busy:
            return
        self._busy = True
        try:
            kind, main = self.seed % 4, self.streams[0]
            if kind == 1:
                for stream in self._random.sample(self.streams[1:], len(self.streams) - 1):
                    self._run_ready(stream)
            elif kind == 2:
                self._try(main, main.given)
            elif kind == 3:
                for _ in range(self._random.choice((0, 0, 1, 2, 5))):
                    stream = self._random.choice(self.streams)
                    if stream.queue:
                        self._step(stream, wait=False)
        finally:
            self._busy = False

    def _try(self, stream: Stream, number: int) -> bool:
        """Do as :meth:`run_until` without waiting for a peer: the host, which a peer may wait for, goes on."""
        while stream.done < number:
            if not all(self._try(other, count) for other, count in stream.queue[0].waits):
                return False
            if stream.done < number and not self._step(stream, wait=False):
                return False
        return True

    def go_on(self) -> None:
        """Run what every stream can do without waiting for another rank."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                moved |= self._run_ready(stream)

    def _run_ready(self, stream: Stream) -> bool:
        before = stream.done
        while stream.queue and self._step(stream, wait=False):
            pass
        return stream.done > before

    def uses(self, region: History) -> list[Work]:
        """Return the works that have not run yet and use that memory."""
        queued = (work for stream in self.streams for work in stream.queue)
        return [work for work in queued if any(each.region is region for each in work.accesses)]
