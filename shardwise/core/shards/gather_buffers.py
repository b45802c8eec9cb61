"""Reuse of the flat arrays that chunks are gathered into."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from shardwise.core.base.torch_internals import storage_holders

_UNSHARED = storage_holders(torch.empty(1, device="cpu"))
"""Holders that torch counts for an array without other readers."""


# [Note: When an array may be used again]
# An array may be reused when torch counts no holder of its storage except the tensor in ``_idle``: each view that
# autograd or the program keeps is another holder. The parameters' own views are gone before an array is given back,
# since eviction points them elsewhere first. An array that is still read waits in ``_idle`` until its size is needed.
# After an update, or if too much is idle, it is dropped, so that its last reader frees it. Dropped arrays are watched
# by weak references, because under a declared capacity memory counts until it is free. ``_UNSHARED`` is measured on a
# fresh array. If torch gives no count (0), no array is reused. Arrays on CUDA are not reused either, since the caching
# allocator does the same and respects streams.
class ArrayPool:
    """Reuses flat host arrays: a fresh page costs about 2 microseconds per 4 KiB, a reused one nothing.

    An array is reused only when nothing else holds its storage. On CUDA torch's caching allocator does this already, so
    nothing is kept here.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self._keeps = device.type == "cpu" and _UNSHARED > 0
        self._idle: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._dropped: list[weakref.ref[torch.UntypedStorage]] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized 1-D array of ``numel`` elements."""
        idle = self._idle.get((numel, dtype), [])
        for index, array in enumerate(idle):
            if storage_holders(array) == _UNSHARED:
                return idle.pop(index)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, array: torch.Tensor) -> None:
        """Return an array to the pool. It is reused after autograd has released it."""
        if self._keeps:
            idle = self._idle.setdefault((array.numel(), array.dtype), [])
            idle.append(array)
            # Drop seldom used sizes first.
            for other in list(self._idle):
                while self.idle_bytes() > self.limit_bytes and self._idle[other]:
                    self._forget([self._idle[other].pop(0)])

    def missing_bytes(self, sizes: Iterable[tuple[int, torch.dtype]]) -> int:
        """Return the bytes that :meth:`take` would have to allocate for all of these arrays."""
        free = {key: sum(storage_holders(array) == _UNSHARED for array in idle) for key, idle in self._idle.items()}
        missing = 0
        for numel, dtype in sizes:
            if free.get((numel, dtype), 0):
                free[numel, dtype] -= 1
            else:
                missing += numel * dtype.itemsize
        return missing

    def _forget(self, arrays: Iterable[torch.Tensor]) -> None:
        """Drop arrays, and watch those that are still read until their readers free them."""
        self._dropped += [weakref.ref(a.untyped_storage()) for a in arrays if storage_holders(a) != _UNSHARED]

    def read_bytes(self) -> int:
        """Return the bytes of dropped arrays that are still read."""
        alive = [(reference, reference()) for reference in self._dropped]
        self._dropped = [reference for reference, storage in alive if storage is not None]
        return sum(storage.nbytes() for _, storage in alive if storage is not None)

    def idle_bytes(self) -> int:
        """Return the bytes kept for reuse."""
        return sum(array.nbytes for idle in self._idle.values() for array in idle)

    def trim(self) -> None:
        """Drop idle arrays that are still read, so that their readers free them."""
        for key, idle in self._idle.items():
            self._idle[key] = [array for array in idle if storage_holders(array) == _UNSHARED]
            self._forget(idle)

    def drop(self) -> None:
        """Drop all idle arrays."""
        for idle in self._idle.values():
            self._forget(idle)
        self._idle.clear()
