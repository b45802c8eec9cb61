"""One allocation for all model data in host memory, page-locked if a GPU copies from it.

Tensors are slices of it instead of separate allocations: page-locking is slow, and torch's pinned allocator rounds
every request up to a power of two.
"""

from __future__ import annotations

import torch

from shardwise.core.base.device import is_page_locked, page_lock

ALIGN_BYTES = 256


def host_block(nbytes: int, pin_for: torch.device | None) -> torch.Tensor:
    """Return long-lived host memory: zeroed uint8 of ``nbytes``.

    Args:
        nbytes: size of the block.
        pin_for: page-lock it for this GPU; ``None``, or another device: ordinary memory.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """
    block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    if pin_for is not None and pin_for.type == "cuda" and nbytes:
        page_lock(block, pin_for)
    return block


class HostArena:
    """Allocates tensors from one block of host memory.

    Args:
        total_bytes: the sum of all tensors, each rounded up (:meth:`rounded`).
        pin_for: page-lock the block for this GPU; ``None``, or another device: ordinary memory.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """

    def __init__(self, total_bytes: int, pin_for: torch.device | None) -> None:
        self._block = host_block(total_bytes, pin_for)
        self._at = 0
        self.pinned = is_page_locked(self._block)

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Return the memory that a tensor of ``nbytes`` takes."""
        return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed 1-D tensor of ``numel`` elements.

        Raises:
            RuntimeError: the arena is full.
        """
        nbytes = numel * dtype.itemsize
        start, stop = self._at, self._at + self.rounded(nbytes)
        if stop > self._block.numel():
            raise RuntimeError(
                f"{stop} bytes do not fit into an arena of {self._block.numel()} bytes of host memory; report this"
            )
        self._at = stop
        return self._block[start : start + nbytes].view(dtype)
