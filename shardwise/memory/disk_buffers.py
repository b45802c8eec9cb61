"""Host memory for transfers: aligned, of fixed size, given out and taken back."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.memory.disk_file import ALIGNMENT_BYTES, round_up

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
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}  # by address
        self.reserved_bytes = 0

    def reserve(self, count: int, nbytes: int) -> None:
        """Adds ``count`` buffers of ``nbytes``, rounded up to 4096, touched so that no transfer meets a fresh page.

        Raises:
            ValueError: a negative number.
        """
        if count < 0 or nbytes < 0:
            raise ValueError(f"reserve(count={count}, nbytes={nbytes}): give numbers >= 0")
        size = max(round_up(nbytes), ALIGNMENT_BYTES)
        for _ in range(count):
            memory = self._allocate(size + ALIGNMENT_BYTES)
            if memory.dtype is not torch.uint8 or memory.device.type != "cpu" or memory.numel() < size:
                raise ValueError(f"allocate gave {memory.dtype} on {memory.device}: give uint8 on the CPU")
            skip = -memory.data_ptr() % ALIGNMENT_BYTES
            self._free.append(memory[skip : skip + size].zero_())
            self.reserved_bytes += size
        self._free.sort(key=Tensor.numel)

    def take(self, nbytes: int) -> Tensor:
        """The smallest free buffer that holds ``nbytes``: uint8, one dimension, ``nbytes`` rounded up to 4096.

        Raises:
            RuntimeError: none is free. Whoever takes them keeps within the number that was reserved for it.
        """
        size = max(round_up(nbytes), ALIGNMENT_BYTES)
        for place, buffer in enumerate(self._free):
            if buffer.numel() >= size:
                del self._free[place]
                self._taken[buffer.data_ptr()] = buffer
                return buffer[:size]
        out = sorted(buffer.numel() for buffer in self._taken.values())
        raise RuntimeError(
            f"no free buffer of {size} bytes; free sizes: {[b.numel() for b in self._free]}, taken: {out}; "
            "give() one back first, or reserve() more"
        )

    def idle(self, nbytes: int) -> int:
        """How many free buffers hold ``nbytes``."""
        return sum(buffer.numel() >= round_up(nbytes) for buffer in self._free)

    def give(self, buffer: Tensor) -> None:
        """Takes back what :meth:`take` gave (the same start; any view of it will do).

        Raises:
            ValueError: it is not out, or not from here.
        """
        whole = self._taken.pop(buffer.data_ptr(), None)
        if whole is None:
            raise ValueError(
                f"a buffer at address {buffer.data_ptr():#x} is not out: give back what buffer() returned, once"
            )
        self._free.append(whole)
        self._free.sort(key=Tensor.numel)

    def close(self) -> None:
        """Forgets all memory; who still holds a buffer keeps it."""
        self._free, self._taken, self.reserved_bytes = [], {}, 0


def _pages(nbytes: int) -> Tensor:
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages for the kernel to pin per request
    return torch.frombuffer(memory, dtype=torch.uint8)
