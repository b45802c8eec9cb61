"""Host memory for transfers: aligned, of fixed size, given out and taken back."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.core.memory.disk.file import ALIGNMENT_BYTES, round_up

__all__ = ["Allocate", "BufferPool"]

Allocate = Callable[[int], Tensor]


class BufferPool:
    """Buffers whose number and sizes :meth:`reserve` fixes. One thread at a time takes and gives them.

    ``allocate(nbytes)`` makes a one-dimensional uint8 CPU tensor of that many bytes (pinned memory, for example);
    ``None``: anonymous pages of this process.

    Attributes:
        reserved_bytes: memory of all buffers.
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate or _pages
        self._buffers: list[tuple[int, Tensor]] = []
        """All of them with their addresses, the smallest first."""
        self._taken: set[int] = set()  # addresses
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
        for address, buffer in self._buffers:
            if address not in self._taken and buffer.numel() >= size:
                self._taken.add(address)
                return buffer[:size]
        free = [buffer.numel() for address, buffer in self._buffers if address not in self._taken]
        sizes = [buffer.numel() for address, buffer in self._buffers if address in self._taken]
        raise RuntimeError(
            f"no free buffer of {size} bytes; free sizes: {free}, taken: {sizes}; "
            "give() one back first, or reserve() more"
        )

    def idle(self, nbytes: int) -> int:
        """How many free buffers hold ``nbytes``."""
        return sum(buffer.numel() >= round_up(nbytes) for at, buffer in self._buffers if at not in self._taken)

    def give(self, buffer: Tensor) -> None:
        """Takes back what :meth:`take` gave (the same start; any view of it will do).

        Raises:
            ValueError: it is not out, or not from here.
        """
        if buffer.data_ptr() not in self._taken:
            raise ValueError(
                f"a buffer at address {buffer.data_ptr():#x} is not out: give back what buffer() returned, once"
            )
        self._taken.remove(buffer.data_ptr())

    def close(self) -> None:
        """Forgets all memory; who still holds a buffer keeps it."""
        self._buffers, self._taken, self.reserved_bytes = [], set(), 0


def _pages(nbytes: int) -> Tensor:
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages for the kernel to pin per request
    return torch.frombuffer(memory, dtype=torch.uint8)
