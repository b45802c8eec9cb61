"""One allocation for everything that is at home in the host's memory, page-locked where a GPU copies from it.

Tensors are cut from it, not allocated one by one: page-locking is slow, and torch's own pinned allocator rounds every
request up to a power of two.
"""

from __future__ import annotations

import weakref

import torch

__all__ = ["HostArena", "host_block"]

ALIGN_BYTES = 256


def host_block(nbytes: int, pin: bool) -> torch.Tensor:
    """Long-lived host memory: zeroed uint8 of ``nbytes``.

    Args:
        nbytes: how much.
        pin: page-lock it; without CUDA it is ordinary memory.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """
    block = torch.zeros(nbytes, dtype=torch.uint8)
    if pin and nbytes and torch.cuda.is_available():
        _register(block)
    return block


class HostArena:
    """Cuts tensors from one block of host memory.

    Args:
        total_bytes: what will be taken in all, each tensor rounded up (:meth:`rounded`).
        pin: page-lock the block; without CUDA it is ordinary memory.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """

    def __init__(self, total_bytes: int, pin: bool) -> None:
        self._block = host_block(total_bytes, pin)
        self._at = 0
        self.pinned = self._block.is_pinned()

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


def _register(block: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)
    if int(result) != 0:
        raise RuntimeError(
            f"CUDA could not page-lock {block.numel()} bytes of host memory (error {int(result)}); raise the limit of "
            "locked memory (ulimit -l), or use pin_memory=False"
        )
    weakref.finalize(block.untyped_storage(), runtime.cudaHostUnregister, block.data_ptr())
