"""Transfers of records: divided into requests, kept in flight by threads, verified by checksums.

Each submitting thread has its own queue of ``queue_depth`` requests; a queue only needs a function that transfers one
request, to a file or to another medium. A record is divided into segments of whole blocks, about 1 MiB; adjacent
segments are assigned to the same thread. A thread keeps its queue full, and computes the checksums of finished segments
while the device works.

Source: block_size, queue_depth, single_submit, overlap_events and thread_count have the meaning of DeepSpeed's aio.
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

from shardwise.core.base.checksum import checksum
from shardwise.core.base.torch_internals import labelled
from shardwise.core.memory.disk.errors import DiskError, explain
from shardwise.plan import DiskPlan

ALIGNMENT_BYTES = 4096  # of addresses, offsets and sizes under O_DIRECT: accepted by every common device


def round_up(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of :data:`ALIGNMENT_BYTES`."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True, eq=False)
class Request:
    """A transfer between memory and file: ``nbytes`` at ``address`` and at ``offset`` of the file (all in bytes).

    ``owner`` and ``segment`` belong to the creator of the request; ``failure`` is a message that the transfer function
    may set in addition to an errno.
    """

    writing: bool
    address: int
    nbytes: int
    offset: int
    owner: Any
    segment: int
    failure: str = ""


class DiskThread(threading.Thread):
    """A thread of a store. Code that waits for the end of a store must not run in one."""


TransferFunction = Callable[[Request], int]
"""Transfers one request and returns the number of bytes or the negative errno; it may also raise an ``OSError``."""


class RequestQueue(Protocol):
    """A queue with at most ``depth`` requests in flight; the caller has to respect this limit."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit all of the requests."""

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        """Wait until ``at_least`` requests are done, and return all finished requests, each with the number of bytes
        transferred or the negative errno."""

    def close(self) -> None:
        """Wait for the requests in flight, and free the queue."""


MakeQueue = Callable[[int, TransferFunction], RequestQueue]
"""Creates a queue from its depth and the function that transfers a request."""
MOST_AT_ONCE = 64
"""Maximal number of threads of one queue: no disk gains from more, while a depth of up to 65536 is accepted."""


# [Note: Threads instead of the kernel's queue]
# One thread per request in flight, in a call that releases the GIL, is as fast as io_submit for blocks of at least 256
# KiB, which plans and published configurations use: it costs some wake-ups per request, and saves the submitting thread
# the kernel's work inside io_submit (pinning pages, waiting for a slot of the device). Small blocks cost twice as much;
# docs/inside/disk.md has the numbers. Threads need no architecture-specific system call numbers and no permission of a
# sandbox, work the same without O_DIRECT, and serve media that are not files.
class ThreadQueue:
    """A queue with up to ``depth`` threads (at most :data:`MOST_AT_ONCE`), each for one request at a time. One thread
    is started at once, which is sufficient, and others when they are needed. (Python 3.12 starts no threads while the
    interpreter exits.)

    Raises:
        RuntimeError: the system refuses to start the first thread.
    """

    def __init__(self, depth: int, transfer: TransferFunction) -> None:
        self._depth, self._transfer = depth, transfer
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, int]] = queue.SimpleQueue()
        self._threads: list[DiskThread] = []
        self._inside = 0
        self._start_one()

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests, with one thread per request in flight up to the limit, or fewer if the system refuses."""
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
        """Wait for ``at_least`` requests, and return all that are done."""
        done = [self._done.get() for _ in range(at_least)]
        while not self._done.empty():
            done.append(self._done.get())
        self._inside -= len(done)
        return done

    def close(self) -> None:
        """Stop the threads after their current requests."""
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
        except BaseException:  # a caller waits for this request
            done.put((request, -codes.EIO))


_SEGMENT_BYTES = 2**20
_LOOK_SECONDS = 1.0  # interval at which a waiting caller checks that the I/O threads are alive


@dataclass(eq=False)
class Operation:
    """A read or write of one version of a record.

    Attributes:
        what: name of the record and its file, for messages.
        offset: offset in the file in bytes. The transfer covers ``memory``; its first ``nbytes`` belong to the record.
        memory: uint8, the caller's buffer; referenced until the transfer is over.
        sums: a checksum for each segment; a write computes it, and a read expects it.
        urgent: whether the operation goes before other operations in the queue.
        error: the error with which it failed.
        over: set when no thread accesses ``memory`` any more.
    """

    what: str
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
        """Record the first error. Requests that have not been submitted are dropped."""
        with self._lock:
            self.error = self.error or error

    def begin(self, parts: int) -> None:
        """Divide the operation into ``parts``, each of which calls :meth:`part_done`."""
        self._parts = parts
        if not parts:
            self.over.set()

    def part_done(self) -> None:
        """Mark a part as done. The last one ends the operation."""
        with self._lock:
            self._parts -= 1
            last = self._parts == 0
        if last:
            self.over.set()

    @property
    def name(self) -> str:
        """The direction and the record, for messages."""
        return f"{'writing' if self.writing else 'reading'} {self.what}"


class Transfer:
    """A transfer that was started."""

    def __init__(self, operation: Operation, alive: Callable[[], bool]) -> None:
        self._operation = operation
        self._alive = alive

    def finished(self) -> bool:
        """Return True if :meth:`wait` would return (or raise) immediately."""
        return self._operation.over.is_set()

    @labelled("disk", lambda transfer: "write" if transfer._operation.writing else "read")
    def wait(self) -> None:
        """Wait until the buffer may be used again: a read has filled it, or a write has stored it.

        Raises:
            DiskError: the device reported an error, the content differs from what was written, or the I/O threads died.
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
    """Adjacent segments of an operation, for one thread."""

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
        """Return the next request to submit, or ``None`` if there are no more (also after an error)."""
        if self.operation.error is None:
            if self._again:
                return self._again.pop()
            if (request := next(self._requests, None)) is not None:
                return request
        self.exhausted = True
        return None

    def completed(self, request: Request, result: int) -> bool:
        """Record the result of a request, and return True if its segment is complete."""
        self.in_flight -= 1
        if result < 0:
            self._fail(request, request.failure or explain(-result), -result)
            return False
        if result < request.nbytes:
            if result == 0 or result % ALIGNMENT_BYTES:
                self._fail(request, f"only {result} bytes were transferred: the file was cut short from outside", 0)
                return False
            self.exhausted = False
            remainder = (request.address + result, request.nbytes - result, request.offset + result)
            self._again.append(Request(request.writing, *remainder, self, request.segment))
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
        """Compute the checksum of a segment in memory; after a read, compare it with the expected one."""
        self.unchecked -= 1
        operation = self.operation
        start = segment * segment_bytes
        computed = checksum(operation.memory[start : min(start + segment_bytes, operation.nbytes)])
        if operation.writing:
            operation.sums[segment] = computed
        elif computed != operation.sums[segment]:
            operation.fail(
                DiskError(
                    f"{operation.name}: the {segment_bytes} bytes at offset {operation.offset + start} are not what "
                    f"was written there (checksum {computed:016x}, not {operation.sums[segment]:016x}); the file was "
                    "changed from outside or the device is faulty: start again from a checkpoint, on another device "
                    "if this repeats"
                )
            )

    def over(self) -> bool:
        """Return True if nothing is left to do."""
        return self.exhausted and not self.in_flight and not self.unchecked


# [Note: Threads of a store]
# Each worker has its own request queue, whose threads access only the memory of a request. Work arrives only through
# ``_inbox``; all other state of a worker and its parts belongs to its thread. Threads share only an operation's error
# and its number of parts, under its lock, and ``over``: once that is set, no thread accesses the memory, and callers
# continue. A failing thread therefore closes its queue first, so that the system finishes or drops the requests in
# flight, and then fails the waiting operations. The threads use neither torch nor other ranks, so they cannot wait for
# a rank. A waiting caller checks periodically that they are alive, because a forked process has none of them. They are
# daemon threads: the store's finalizer stops them, also when the interpreter exits. The garbage collector may run the
# finalizer in any thread; in a thread of a store, which cannot wait for its own end, the finalizer continues in another
# thread.
class _Worker:
    """A submitting thread with its own queue."""

    def __init__(self, requests: RequestQueue, plan: DiskPlan, segment_bytes: int) -> None:
        self._queue, self._plan, self._segment_bytes = requests, plan, segment_bytes
        self.moved = {False: 0, True: 0}
        """Bytes that were read, and (True) written; only this thread changes them."""
        self._inbox: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._parts: deque[_Part] = deque()  # with requests to submit, urgent ones first, then oldest first
        self._live: set[_Part] = set()
        self._to_check: list[tuple[_Part, int]] = []
        self._in_flight = 0
        self._closing = False
        self.thread = DiskThread(target=self._run, name="shardwise-disk", daemon=True)
        self.thread.start()

    def post(self, part: _Part | None) -> None:
        """Enqueue work. ``None`` stops the worker after the work that is enqueued."""
        self._inbox.put(part)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._receive():
                self._step()
        except BaseException as error:
            failure = error
        # No thread may write to a caller's memory after this point, so close the queue before failing the operations.
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
        """Receive new work, and wait only if there is nothing else to do. Return False at the end."""
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
        # The device is busy again, so there is time to compute checksums.
        for part, segment in self._to_check:
            part.check(segment, self._segment_bytes)
        self._to_check.clear()
        for part in touched:
            if part.over() and part in self._live:
                self._live.remove(part)
                part.operation.part_done()

    def _fill(self) -> set[_Part]:
        """Submit requests until the queue is full or nothing is left; return the parts without further requests."""
        ended: set[_Part] = set()
        batch: list[Request] = []
        while self._parts and self._in_flight + len(batch) < self._plan.queue_depth:
            request = self._parts[0].next_request()
            if request is None:
                ended.add(self._parts.popleft())
                continue
            batch.append(request)
            if self._plan.single_submit:
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
        at_least = 1 if self._plan.overlap_events else self._in_flight
        touched: set[_Part] = set()
        for request, result in self._queue.reap(at_least):
            self._in_flight -= 1
            part: _Part = request.owner
            if result > 0:
                self.moved[request.writing] += result
            if part.completed(request, result):
                self._to_check.append((part, request.segment))
            if not part.exhausted and part not in self._parts:
                # Resubmit the remainder of a short transfer before new requests.
                self._parts.appendleft(part)
            touched.add(part)
        return touched


class DiskIO:
    """The I/O threads of one store, and their shared state.

    Args:
        queues: a queue for each thread, for ``plan.queue_depth`` requests.
        plan: the settings of transfers.

    Raises:
        RuntimeError: the system refuses to start a thread; all threads are stopped then.
    """

    def __init__(self, queues: list[RequestQueue], plan: DiskPlan) -> None:
        self._block_bytes = plan.block_bytes
        # A multiple of block_bytes, so that no request crosses a segment boundary.
        self.segment_bytes = -(-_SEGMENT_BYTES // self._block_bytes) * self._block_bytes
        self._turn = 0
        self._workers: list[_Worker] = []
        try:
            for one in queues:
                self._workers.append(_Worker(one, plan, self.segment_bytes))
        except BaseException:
            self.close()
            raise

    def segments(self, nbytes: int) -> int:
        """Return the number of segments of ``nbytes``."""
        return -(-nbytes // self.segment_bytes)

    def moved(self, writing: bool) -> int:
        """Return the bytes that were read or written so far."""
        return sum(worker.moved[writing] for worker in self._workers)

    def alive(self) -> bool:
        """Return True if every thread is alive. A forked process has none of them."""
        return all(worker.thread.is_alive() for worker in self._workers)

    def start(self, operation: Operation) -> None:
        """Start ``operation`` on the threads.

        Raises:
            DiskError: the threads are gone.
        """
        if not self.alive():
            raise DiskError(f"{operation.name}: the store is closed, or this is a forked process; make a new store")
        segments = self.segments(operation.memory.nbytes)
        parts = min(segments, len(self._workers))
        work = []
        for index in range(parts):
            first, last = segments * index // parts, segments * (index + 1) // parts
            part = _Part(operation, first, last, self._block_bytes, self.segment_bytes)
            work.append((self._workers[(self._turn + index) % len(self._workers)], part))
        operation.begin(parts)
        for worker, part in work:
            worker.post(part)
        self._turn += parts

    def handle(self, operation: Operation) -> Transfer:
        """Return a handle to wait for an operation that was started here."""
        # A weak reference, since the handle may outlive the store and must not keep its threads alive.
        reference = weakref.ref(self)
        return Transfer(operation, lambda: (disk := reference()) is not None and disk.alive())

    def close(self) -> None:
        """Stop the threads after their current work. Idempotent. Must not be called in one of them."""
        for worker in self._workers:
            worker.post(None)
        for worker in self._workers:
            worker.thread.join()
