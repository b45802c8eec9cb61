"""Where requests meet what keeps the bytes: threads that make one blocking call each.

A queue takes requests and gives back results. Below it is only the function that transfers one request, of a file or of
another medium; so tests replace a queue to make a device fail.
"""

from __future__ import annotations

import contextlib
import errno as codes
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["MOST_AT_ONCE", "DiskThread", "MakeQueue", "Request", "RequestQueue", "ThreadQueue", "TransferFunction"]


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
