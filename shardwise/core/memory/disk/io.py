"""Transfers of records: cut into requests, kept in flight by threads, verified by checksums.

Each submitting thread has its own queue of ``queue_depth`` requests; below a queue is only the function that transfers
one request, of a file or of another medium. A record is divided into segments of whole blocks, about 1 MiB;
neighbouring segments go to the same thread. A thread keeps its queue full, and computes the checksums of finished
segments while the device works.

Source: the meaning of block_size, queue_depth, single_submit, overlap_events and thread_count is DeepSpeed's aio.
"""

from __future__ import annotations

import contextlib
import errno as codes
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardwise.core.memory.disk.checksum import checksum
from shardwise.core.memory.disk.errors import DiskError, explain
from shardwise.core.memory.disk.file import ALIGNMENT_BYTES

__all__ = [
    "MOST_AT_ONCE",
    "DiskIO",
    "DiskThread",
    "MakeQueue",
    "Operation",
    "Request",
    "RequestQueue",
    "ThreadQueue",
    "Traffic",
    "Transfer",
    "TransferFunction",
]


@dataclass(slots=True, eq=False)
class Request:
    """One transfer between memory and file: ``nbytes`` at ``address`` and at ``offset`` of the file (all in bytes).

    ``owner`` and ``segment`` belong to whoever made the request; ``failure`` is what whoever transfers it has to say
    beside an errno.
    """

    writing: bool
    address: int
    nbytes: int
    offset: int
    owner: Any
    segment: int
    failure: str = ""


class DiskThread(threading.Thread):
    """One of a store's. Whoever waits for a store to end cannot do so in one."""


TransferFunction = Callable[[Request], int]
"""Makes one transfer: returns the number of bytes, or minus the errno; an ``OSError`` is as good as its errno."""


class RequestQueue(Protocol):
    """At most ``depth`` requests are inside at any time; the caller sees to it."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Hands over all of them."""

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        """Waits until ``at_least`` requests are done and returns these and others that are, with the number of bytes
        transferred, or minus the errno."""

    def close(self) -> None:
        """Waits for what is inside, and frees the queue."""


MakeQueue = Callable[[int, TransferFunction], RequestQueue]
"""From the depth, and what transfers a request."""
MOST_AT_ONCE = 64
"""Threads of one queue, however deep it is: no disk gains by more, and a depth of 65536 is accepted."""


# [Note: Threads instead of the kernel's queue]
# A thread for each request in flight, in a call that frees the interpreter, takes no longer than io_submit did for
# blocks from 256 KiB on, which is what plans and published configurations have: it costs some wake-ups a request, and
# spares the submitting thread what the kernel does inside io_submit (pinning pages, waiting for a slot of the device).
# Small blocks cost twice as much; docs/inside/disk.md has the figures. It needs no call numbers of an architecture and
# no permission of a sandbox, is the same without O_DIRECT, and serves media that are no files.
class ThreadQueue:
    """Up to ``depth`` threads (and :data:`MOST_AT_ONCE`), each for one request at a time: one from the start, which is
    enough, the others as needed. (While the interpreter exits, Python 3.12 starts no thread.)

    Raises:
        RuntimeError: the system refuses the first.
    """

    def __init__(self, depth: int, transfer: TransferFunction) -> None:
        self._depth, self._transfer = depth, transfer
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, int]] = queue.SimpleQueue()
        self._threads: list[DiskThread] = []
        self._inside = 0
        self._start_one()

    def submit(self, requests: Sequence[Request]) -> None:
        """One thread for each that is inside, as far as there may be so many; fewer where the system refuses them."""
        self._inside += len(requests)
        with contextlib.suppress(RuntimeError):
            while len(self._threads) < min(self._inside, self._depth, MOST_AT_ONCE):
                self._start_one()
        for request in requests:
            self._work.put(request)

    def _start_one(self) -> None:
        arguments = (self._transfer, self._work, self._done)
        thread = DiskThread(target=_transfer_all, args=arguments, name="shardwise-disk-io", daemon=True)
        thread.start()
        self._threads.append(thread)

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        """Waits for the first, takes along what else is done."""
        done = [self._done.get() for _ in range(at_least)]
        while not self._done.empty():
            done.append(self._done.get())
        self._inside -= len(done)
        return done

    def close(self) -> None:
        """Ends the threads after what they have in hand."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []


def _transfer_all(
    transfer: TransferFunction, work: queue.SimpleQueue[Request | None], done: queue.SimpleQueue[tuple[Request, int]]
) -> None:
    while (request := work.get()) is not None:
        try:
            done.put((request, transfer(request)))
        except OSError as error:
            done.put((request, -(error.errno or codes.EIO)))
        except BaseException:  # somebody waits for it
            done.put((request, -codes.EIO))


_SEGMENT_BYTES = 2**20
_LOOK_SECONDS = 1.0  # how often a waiting caller looks whether the I/O threads live


class Traffic:
    """Bytes that were transferred, by direction and kind of record; counted by the I/O threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[tuple[bool, str], int] = {}

    def add(self, writing: bool, kind: str, nbytes: int) -> None:
        """Counts one transfer."""
        with self._lock:
            self._bytes[writing, kind] = self._bytes.get((writing, kind), 0) + nbytes

    def by_kind(self, writing: bool) -> dict[str, int]:
        """Bytes written or read, by kind."""
        with self._lock:
            return {kind: nbytes for (way, kind), nbytes in self._bytes.items() if way == writing}

    def reset(self) -> None:
        """Starts from 0."""
        with self._lock:
            self._bytes.clear()


@dataclass(eq=False)
class Operation:
    """One read or write of one version of a record.

    Attributes:
        what: the record and its file, for messages.
        offset: in the file, bytes. The transfer covers ``memory``; the first ``nbytes`` of it are the record's.
        memory: uint8, the caller's buffer; held until the transfer is over.
        sums: one checksum a segment: made by a write, expected by a read.
        urgent: goes before others that wait for their turn.
        error: why it failed.
        over: set when nothing will touch ``memory`` any more.
    """

    what: str
    kind: str
    writing: bool
    offset: int
    nbytes: int
    memory: npt.NDArray[np.uint8]
    sums: list[int]
    urgent: bool = False
    error: DiskError | None = None
    over: threading.Event = field(default_factory=threading.Event)
    waited: bool = False
    _parts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: DiskError) -> None:
        """Keeps the first error; the requests that are not yet submitted are dropped."""
        with self._lock:
            self.error = self.error or error

    def begin(self, parts: int) -> None:
        """Divided into ``parts``, each of which calls :meth:`part_done`."""
        self._parts = parts
        if not parts:
            self.over.set()

    def part_done(self) -> None:
        """The last part ends the operation."""
        with self._lock:
            self._parts -= 1
            last = self._parts == 0
        if last:
            self.over.set()

    @property
    def name(self) -> str:
        """Direction and record, for messages."""
        return f"{'writing' if self.writing else 'reading'} {self.what}"


class Transfer:
    """A transfer that was started."""

    def __init__(self, operation: Operation, alive: Callable[[], bool]) -> None:
        self._operation = operation
        self._alive = alive

    def finished(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._operation.over.is_set()

    def wait(self) -> None:
        """Returns when the buffer may be used again: it holds what was read, or what it held is written.

        Raises:
            DiskError: the device reported an error, the content is not what was written, or the I/O threads died.
        """
        operation = self._operation
        while not operation.over.wait(_LOOK_SECONDS):
            if not self._alive() and not operation.over.is_set():
                raise DiskError(
                    f"{operation.name}: the threads that transfer are gone (closed, or this is a forked process); "
                    "make a new store"
                )
        if operation.error is not None:
            raise operation.error
        operation.waited = True


class _Part:
    """Neighbouring segments of an operation, for one thread."""

    def __init__(self, operation: Operation, first: int, last: int, block_bytes: int, segment_bytes: int) -> None:
        self.operation = operation
        self.in_flight = 0
        self.exhausted = False
        self.unchecked = 0
        self.received = False
        self._missing: dict[int, int] = {}  # bytes by segment
        self._requests = self._cut(range(first, last), block_bytes, segment_bytes)
        self._again: list[Request] = []

    def _cut(self, segments: range, block_bytes: int, segment_bytes: int) -> Iterator[Request]:
        operation = self.operation
        address, total = operation.memory.ctypes.data, operation.memory.nbytes
        for segment in segments:
            start, stop = segment * segment_bytes, min((segment + 1) * segment_bytes, total)
            self._missing[segment] = stop - start
            for at in range(start, stop, block_bytes):
                size = min(block_bytes, stop - at)
                offset = operation.offset + at
                yield Request(operation.writing, address + at, size, offset, self, segment)

    def next_request(self) -> Request | None:
        """The next one to submit; ``None`` when there is none (also after an error)."""
        if self.operation.error is None:
            if self._again:
                return self._again.pop()
            if (request := next(self._requests, None)) is not None:
                return request
        self.exhausted = True
        return None

    def completed(self, request: Request, result: int) -> bool:
        """Takes note of a result; whether that was the last of its segment."""
        self.in_flight -= 1
        if result < 0:
            self._fail(request, request.failure or explain(-result), -result)
            return False
        if result < request.nbytes:
            if result == 0 or result % ALIGNMENT_BYTES:
                self._fail(request, f"only {result} bytes were transferred: the file was cut short from outside", 0)
                return False
            self.exhausted = False
            rest = (request.address + result, request.nbytes - result, request.offset + result)
            self._again.append(Request(request.writing, *rest, self, request.segment))
        self._missing[request.segment] -= result
        if self._missing[request.segment]:
            return False
        del self._missing[request.segment]
        self.unchecked += 1
        return True

    def _fail(self, request: Request, reason: str, number: int) -> None:
        operation = self.operation
        place = f"{request.nbytes} bytes at offset {request.offset}"
        operation.fail(DiskError(f"{operation.name}, {place}: {reason}", number))

    def check(self, segment: int, segment_bytes: int) -> None:
        """Makes the checksum of a segment in memory, and compares it where something was read."""
        self.unchecked -= 1
        operation = self.operation
        start = segment * segment_bytes
        found = checksum(operation.memory[start : min(start + segment_bytes, operation.nbytes)])
        if operation.writing:
            operation.sums[segment] = found
        elif found != operation.sums[segment]:
            operation.fail(
                DiskError(
                    f"{operation.name}: the {segment_bytes} bytes at offset {operation.offset + start} are not what "
                    f"was written there (checksum {found:016x}, not {operation.sums[segment]:016x}); the file was "
                    "changed from outside or the device is faulty: start again from a checkpoint, on another device "
                    "if this repeats"
                )
            )

    def over(self) -> bool:
        """Whether nothing of it is left to do."""
        return self.exhausted and not self.in_flight and not self.unchecked


# [Note: Threads of a store]
# Each has a queue of requests of its own, whose threads touch a request's memory and nothing else. Work comes in by
# ``_inbox`` alone; all else of a worker and of its parts belongs to its thread. Between threads are only an operation's
# error and count of parts, under its lock, and ``over``: once that is set nothing touches the memory again, and callers
# go on. Hence the order in which a thread that fails gives up: its queue first, for which the system finishes or drops
# what is inside, then the operations that wait. The threads know no torch and no peers, so nothing they do can wait for
# a rank. A caller that waits looks now and then whether they live, because a forked process has none of them. They are
# daemons: what ends them is the store's finalizer, which also runs when the interpreter exits. A collection of garbage
# may call it in any thread; in one of a store's, which cannot wait for its own end, it goes on in another.
class _Worker:
    """One submitting thread with its own queue."""

    def __init__(self, requests: RequestQueue, depth: int, knobs: _Knobs, traffic: Traffic) -> None:
        self._queue = requests
        self._depth = depth
        self._knobs = knobs
        self._traffic = traffic
        self._inbox: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._parts: deque[_Part] = deque()  # with requests to submit, urgent ones first, then oldest first
        self._live: set[_Part] = set()
        self._to_check: list[tuple[_Part, int]] = []
        self._in_flight = 0
        self._closing = False
        self.thread = DiskThread(target=self._run, name="shardwise-disk", daemon=True)
        self.thread.start()

    def post(self, part: _Part | None) -> None:
        """Work to do; ``None``: end after what is there."""
        self._inbox.put(part)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._receive():
                self._step()
        except BaseException as error:
            failure = error
        # From here on nothing may be written to anybody's memory, so the queue goes before the waiting callers.
        with contextlib.suppress(Exception):
            self._queue.close()
        if failure is not None:
            self._give_up(failure)

    def _give_up(self, failure: BaseException) -> None:
        reason = f"the I/O thread stopped: {type(failure).__name__}: {failure}; make a new store"
        while True:
            for part in self._live:
                part.operation.fail(DiskError(f"{part.operation.name}: {reason}"))
                part.operation.part_done()
            self._live.clear()
            part_or_end = self._inbox.get()
            if part_or_end is None:
                return
            if not part_or_end.received:
                part_or_end.received = True
                self._live.add(part_or_end)

    def _receive(self) -> bool:
        """Takes in new work, waiting only where there is nothing else to do; False at the end."""
        while True:
            idle = not self._live and not self._closing
            try:
                part = self._inbox.get() if idle else self._inbox.get_nowait()
            except queue.Empty:
                return bool(self._live) or not self._closing
            if part is None:
                self._closing = True
            elif not part.received:
                part.received = True
                self._queue_up(part)
                self._live.add(part)

    def _queue_up(self, part: _Part) -> None:
        urgent = part.operation.urgent
        later = (at for at, other in enumerate(self._parts) if urgent and not other.operation.urgent)
        self._parts.insert(next(later, len(self._parts)), part)

    def _step(self) -> None:
        touched = self._collect() if self._in_flight else set()
        touched |= self._fill()
        # The device is busy again; now there is time to compute.
        for part, segment in self._to_check:
            part.check(segment, self._knobs.segment_bytes)
        self._to_check.clear()
        for part in touched:
            if part.over() and part in self._live:
                self._live.remove(part)
                part.operation.part_done()

    def _fill(self) -> set[_Part]:
        """Submits until the queue is full or nothing is left; the parts that have nothing left to submit."""
        ended: set[_Part] = set()
        batch: list[Request] = []
        while self._parts and self._in_flight + len(batch) < self._depth:
            request = self._parts[0].next_request()
            if request is None:
                ended.add(self._parts.popleft())
                continue
            batch.append(request)
            if self._knobs.single_submit:
                self._submit(batch)
                batch = []
        self._submit(batch)
        return ended

    def _submit(self, batch: list[Request]) -> None:
        if batch:
            self._queue.submit(batch)
        self._in_flight += len(batch)
        for request in batch:
            request.owner.in_flight += 1

    def _collect(self) -> set[_Part]:
        at_least = 1 if self._knobs.overlap_events else self._in_flight
        touched: set[_Part] = set()
        for request, result in self._queue.reap(at_least):
            self._in_flight -= 1
            part: _Part = request.owner
            if result > 0:
                self._traffic.add(request.writing, part.operation.kind, result)
            if part.completed(request, result):
                self._to_check.append((part, request.segment))
            if not part.exhausted and part not in self._parts:
                # The rest of a short transfer goes before what is new.
                self._parts.appendleft(part)
            touched.add(part)
        return touched


@dataclass(frozen=True, kw_only=True)
class _Knobs:
    block_bytes: int
    segment_bytes: int
    single_submit: bool
    overlap_events: bool


class DiskIO:
    """The I/O threads of one store, and what they share.

    Args:
        queues: one queue for each thread, of ``depth`` requests.
        block_bytes: largest request.
        single_submit: one request per submission, instead of as many as fit.
        overlap_events: refill the queue after each completion, instead of after all of a full queue.

    Raises:
        RuntimeError: the system refuses a thread; none is left then.
    """

    def __init__(
        self, queues: list[RequestQueue], depth: int, *, block_bytes: int, single_submit: bool, overlap_events: bool
    ) -> None:
        # Whole blocks, so that no request crosses a segment.
        self.segment_bytes = -(-_SEGMENT_BYTES // block_bytes) * block_bytes
        self.traffic = Traffic()
        self._turn = 0
        self._knobs = _Knobs(
            block_bytes=block_bytes,
            segment_bytes=self.segment_bytes,
            single_submit=single_submit,
            overlap_events=overlap_events,
        )
        self._workers: list[_Worker] = []
        try:
            for one in queues:
                self._workers.append(_Worker(one, depth, self._knobs, self.traffic))
        except BaseException:
            self.close()
            raise

    def segments(self, nbytes: int) -> int:
        """How many segments ``nbytes`` have."""
        return -(-nbytes // self.segment_bytes)

    def alive(self) -> bool:
        """Whether every thread runs; a forked process has none of them."""
        return all(worker.thread.is_alive() for worker in self._workers)

    def start(self, operation: Operation) -> None:
        """Hands ``operation`` to the threads.

        Raises:
            DiskError: they are gone.
        """
        if not self.alive():
            raise DiskError(f"{operation.name}: the store is closed, or this is a forked process; make a new store")
        segments = self.segments(operation.memory.nbytes)
        parts = min(segments, len(self._workers))
        work = []
        for index in range(parts):
            first, last = segments * index // parts, segments * (index + 1) // parts
            part = _Part(operation, first, last, self._knobs.block_bytes, self.segment_bytes)
            work.append((self._workers[(self._turn + index) % len(self._workers)], part))
        operation.begin(parts)
        for worker, part in work:
            worker.post(part)
        self._turn += parts

    def handle(self, operation: Operation) -> Transfer:
        """Waits for an operation that was started here."""
        # Weak, since the handle may outlive the store and must not keep its threads.
        io = weakref.ref(self)
        return Transfer(operation, lambda: (found := io()) is not None and found.alive())

    def close(self) -> None:
        """Ends the threads after the work they have. May be called again; in none of them."""
        for worker in self._workers:
            worker.post(None)
        for worker in self._workers:
            worker.thread.join()
