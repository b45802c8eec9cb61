"""One allocation for everything that is at home in the host's memory, page-locked where a GPU copies from it.

Tensors are cut from it, not allocated one by one: page-locking is slow, and torch's own pinned allocator rounds every
request up to a power of two.
"""

from __future__ import annotations

import torch

from shardwise.core.base.device import is_page_locked, page_lock

__all__ = ["HostArena", "host_block"]

ALIGN_BYTES = 256


def host_block(nbytes: int, pin_for: torch.device | None) -> torch.Tensor:
    """Long-lived host memory: zeroed uint8 of ``nbytes``.

    Args:
        nbytes: how much.
        pin_for: page-lock it for this GPU; ``None``, or another device: it is ordinary memory.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """
    block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    if pin_for is not None and pin_for.type == "cuda" and nbytes:
        page_lock(block, pin_for)
    return block


class HostArena:
    """Cuts tensors from one block of host memory.

    Args:
        total_bytes: what will be taken in all, each tensor rounded up (:meth:`rounded`).
        pin_for: page-lock the block for this GPU; ``None``, or another device: it is ordinary memory.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """

    def __init__(self, total_bytes: int, pin_for: torch.device | None) -> None:
        self._block = host_block(total_bytes, pin_for)
        self._at = 0
        self.pinned = is_page_locked(self._block)

    @staticmethod
    def rounded(nbytes: int) -> int:
        """What a tensor of ``nbytes`` takes."""
        return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D tensor of ``numel`` elements.

        Raises:
            RuntimeError: more is taken than was announced.
        """
        nbytes = numel * dtype.itemsize
        start, stop = self._at, self._at + self.rounded(nbytes)
        if stop > self._block.numel():
            raise RuntimeError(f"{stop} bytes of host memory are wanted of {self._block.numel()}; report this")
        self._at = stop
        return self._block[start : start + nbytes].view(dtype)
