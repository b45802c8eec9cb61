"""Where requests meet the operating system: the kernel's asynchronous I/O, and a pool of threads for where it is not.

A queue takes requests and gives back results. It is the lowest level, so tests replace it to make a device fail.
The kernel's queue is entered by system calls through ctypes: no library and no compiler is needed.
"""

from __future__ import annotations

import ctypes
import errno as codes
import os
import platform
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["KernelQueue", "Request", "RequestQueue", "ThreadQueue"]


@dataclass(slots=True, eq=False)
class Request:
    """One transfer between memory and file: ``nbytes`` at ``address`` and at ``offset`` of ``fd`` (all in bytes).

    ``owner`` and ``segment`` belong to whoever made the request; ``failure`` is what whoever transfers it has to say
    beside an errno.
    """

    writing: bool
    fd: int
    address: int
    nbytes: int
    offset: int
    owner: Any
    segment: int
    failure: str = ""


Transfer = Callable[[Request], int]


class RequestQueue(Protocol):
    """At most ``depth`` requests are inside at any time; the caller sees to it."""

    def submit(self, requests: Sequence[Request]) -> int:
        """Hands over the first requests, in one go, and returns how many; 0: none fits at the moment."""

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        """Waits until ``at_least`` requests are done and returns these and others that are, with the number of bytes
        transferred, or minus the errno."""

    def close(self) -> None:
        """Waits for what is inside, and frees the queue."""


class _Iocb(ctypes.Structure):
    # struct iocb of linux/aio_abi.h, little endian
    _fields_ = [
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64),
        ("iocb", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class _Calls:
    setup: int
    destroy: int
    submit: int
    getevents: int


_NUMBERS = {
    "x86_64": _Calls(setup=206, destroy=207, submit=209, getevents=208),
    "aarch64": _Calls(setup=0, destroy=1, submit=2, getevents=4),
}
_READ, _WRITE = 0, 1  # IOCB_CMD_PREAD, IOCB_CMD_PWRITE


class KernelQueue:
    """The kernel's own queue (io_submit). With O_DIRECT it transfers without a thread of ours waiting.

    Raises:
        OSError: the kernel or a sandbox refuses it, or the architecture's call numbers are not known here.
    """

    def __init__(self, depth: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(codes.ENOSYS, f"asynchronous I/O is not known on {platform.machine()!r}")
        self._numbers = numbers
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        if self._call(numbers.setup, ctypes.c_long(depth), ctypes.byref(self._context)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._iocbs = (_Iocb * depth)()
        self._addresses = [ctypes.addressof(self._iocbs[slot]) for slot in range(depth)]
        self._pointers = (ctypes.c_void_p * depth)()
        self._events = (_Event * depth)()
        self._free = list(range(depth))
        self._inside: list[Request | None] = [None] * depth
        self._refused: list[tuple[Request, int]] = []

    def submit(self, requests: Sequence[Request]) -> int:
        """One io_submit for all of them. A request that the kernel refuses comes back from :meth:`reap`."""
        slots = [self._free.pop() for _ in requests]
        for place, (slot, request) in enumerate(zip(slots, requests, strict=True)):
            iocb = self._iocbs[slot]
            iocb.data = slot
            iocb.opcode = _WRITE if request.writing else _READ
            iocb.fd = request.fd
            iocb.address = request.address
            iocb.nbytes = request.nbytes
            iocb.offset = request.offset
            self._pointers[place] = self._addresses[slot]
            self._inside[slot] = request
        taken = self._call(self._numbers.submit, self._context, ctypes.c_long(len(slots)), self._pointers)
        number = ctypes.get_errno()
        kept = max(taken, 0)
        # Before the error is looked at: what the kernel has not taken is free in any case.
        self._free.extend(slots[kept:])
        if taken < 0 and number not in (codes.EAGAIN, codes.EINTR):
            self._refused.append((requests[0], -number))  # an error of io_submit is about the first request
            return 1
        return kept

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        """One io_getevents, repeated only after a signal."""
        done, self._refused = self._refused, []
        missing = max(0, at_least - len(done))
        capacity = ctypes.c_long(len(self._events))
        while True:
            count = self._call(
                self._numbers.getevents, self._context, ctypes.c_long(missing), capacity, self._events, None
            )
            if count >= 0:
                break
            number = ctypes.get_errno()
            if number != codes.EINTR:
                raise OSError(number, os.strerror(number))
        for event in self._events[:count]:
            request = self._inside[event.data]
            assert request is not None
            self._inside[event.data] = None
            self._free.append(event.data)
            done.append((request, event.result))
        return done

    def close(self) -> None:
        """The kernel waits for what is inside: memory is not written to afterwards."""
        if self._context.value:
            self._call(self._numbers.destroy, self._context)
            self._context.value = 0

    def _call(self, *arguments: Any) -> int:
        # A variadic function: without a type ctypes would pass the number in 32 bits.
        return int(self._syscall(ctypes.c_long(arguments[0]), *arguments[1:]))


class ThreadQueue:
    """Up to ``depth`` threads, started as they are needed.

    Args:
        depth: how many.
        transfer: what they do with a request: returns as :meth:`RequestQueue.reap` does. ``None``: preadv and pwritev.
    """

    def __init__(self, depth: int, transfer: Transfer | None = None) -> None:
        self._depth, self._transfer = depth, transfer or _transfer
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, int]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._inside = 0

    def submit(self, requests: Sequence[Request]) -> int:
        """All of them; one thread for each that is inside."""
        self._inside += len(requests)
        while len(self._threads) < min(self._inside, self._depth):
            arguments = (self._transfer, self._work, self._done)
            thread = threading.Thread(target=_transfer_all, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)
        for request in requests:
            self._work.put(request)
        return len(requests)

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
    transfer: Transfer, work: queue.SimpleQueue[Request | None], done: queue.SimpleQueue[tuple[Request, int]]
) -> None:
    while (request := work.get()) is not None:
        try:
            done.put((request, transfer(request)))
        except OSError as error:
            done.put((request, -(error.errno or codes.EIO)))
        except BaseException:  # somebody waits for it
            done.put((request, -codes.EIO))


def _transfer(request: Request) -> int:
    memory = (ctypes.c_char * request.nbytes).from_address(request.address)
    move = os.pwritev if request.writing else os.preadv
    return move(request.fd, [memory], request.offset)
