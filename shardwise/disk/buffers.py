"""Host memory for transfers: aligned, of fixed size, given out and taken back."""

from __future__ import annotations

import contextlib
import gc
import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.disk.file import ALIGNMENT_BYTES, round_up

__all__ = ["Allocate", "BufferPool"]

Allocate = Callable[[int], Tensor]


# [Note: Transfers and interrupts]
# In the thread that trains an interrupt may come between any two operations of Python, so also between taking something
# and noting it down. What that would lose is found again:
# * a buffer that is out is known by a weak reference to what take() returned; nobody holds that any more: it is free;
# * a transfer is noted in the store before the threads have it, and its memory is not given out before it is over, even
#   if its handle is lost (DiskStore._end_transfers);
# * a version counts as written to before its first byte is, so that commit() cannot take it for an untouched one.
# Nothing here waits for a free buffer. Whoever takes some keeps within the number that was reserved for it, and a taker
# that finds none has miscounted, which is said.
class BufferPool:
    """Buffers whose number and sizes :meth:`reserve` fixes. One thread at a time takes and gives them.

    Whoever is interrupted (Ctrl-C) between taking a buffer and noting it down has lost it; it is free again as soon as
    nobody holds the tensor that :meth:`take` returned.

    ``allocate(nbytes)`` makes a one-dimensional uint8 CPU tensor of that many bytes (pinned memory, for example);
    ``None``: anonymous pages of this process.

    Attributes:
        reserved_bytes: memory of all buffers.
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate or _pages
        self._buffers: list[tuple[int, Tensor]] = []
        """All of them with their addresses, the smallest first."""
        self._taken: dict[int, weakref.ref[Tensor]] = {}
        """By address, what was returned. The only record of what is out, so each change is one operation."""
        self.reserved_bytes = 0

    def reserve(self, count: int, nbytes: int) -> None:
        """Adds ``count`` buffers of ``nbytes``, rounded up to 4096, touched so that no transfer meets a fresh page.

        Raises:
            ValueError: a negative number.
        """
        if count < 0 or nbytes < 0:
            raise ValueError(f"reserve(count={count}, nbytes={nbytes}): give numbers >= 0")
        size = max(round_up(nbytes), ALIGNMENT_BYTES)
        more = []
        for _ in range(count):
            memory = self._allocate(size + ALIGNMENT_BYTES)
            if memory.dtype is not torch.uint8 or memory.device.type != "cpu" or memory.numel() < size:
                raise ValueError(f"allocate gave {memory.dtype} on {memory.device}: give uint8 on the CPU")
            skip = -memory.data_ptr() % ALIGNMENT_BYTES
            buffer = memory[skip : skip + size].zero_()
            more.append((buffer.data_ptr(), buffer))
        self._buffers = sorted([*self._buffers, *more], key=lambda each: each[1].numel())
        self.reserved_bytes += size * count

    def take(self, nbytes: int) -> Tensor:
        """The smallest free buffer that holds ``nbytes``: uint8, one dimension, ``nbytes`` rounded up to 4096.

        Raises:
            RuntimeError: none is free. Whoever takes them keeps within the number that was reserved for it.
        """
        size = max(round_up(nbytes), ALIGNMENT_BYTES)
        self._take_back_lost()  # or a larger one, that another needs, would be taken instead
        for look_again in (True, False):
            for address, buffer in self._buffers:
                if address not in self._taken and buffer.numel() >= size:
                    out = buffer[:size]
                    self._taken[address] = weakref.ref(out)
                    return out
            if look_again:
                gc.collect()  # an exception that was caught may hold it in a cycle
                self._take_back_lost()
        free = [buffer.numel() for address, buffer in self._buffers if address not in self._taken]
        sizes = [buffer.numel() for address, buffer in self._buffers if address in self._taken]
        raise RuntimeError(
            f"no free buffer of {size} bytes; free sizes: {free}, taken: {sizes}; "
            "give() one back first, or reserve() more"
        )

    def _take_back_lost(self) -> None:
        for address in [address for address, out in self._taken.items() if out() is None]:
            del self._taken[address]

    def idle(self, nbytes: int) -> int:
        """How many free buffers hold ``nbytes``."""
        self._take_back_lost()
        return sum(buffer.numel() >= round_up(nbytes) for at, buffer in self._buffers if at not in self._taken)

    def give(self, buffer: Tensor) -> None:
        """Takes back what :meth:`take` gave (the same start; any view of it will do).

        Raises:
            ValueError: it is not out, or not from here.
        """
        if self._taken.pop(buffer.data_ptr(), None) is None:
            raise ValueError(
                f"a buffer at address {buffer.data_ptr():#x} is not out: give back what buffer() returned, once"
            )

    def close(self) -> None:
        """Forgets all memory; who still holds a buffer keeps it."""
        self._buffers, self._taken, self.reserved_bytes = [], {}, 0


def _pages(nbytes: int) -> Tensor:
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages for the kernel to pin per request
    return torch.frombuffer(memory, dtype=torch.uint8)
