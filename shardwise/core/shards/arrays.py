"""Flat arrays that are used again and again for what is gathered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from shardwise.core.base.torch_internals import storage_holders

__all__ = ["ArrayPool"]

_UNSHARED = storage_holders(torch.empty(1, device="cpu"))
"""How many holders torch counts for an array that nobody else reads."""


# [Note: When an array may be used again]
# When torch counts no holder of its storage but the tensor in ``_idle``: each view that autograd or the program keeps
# is one more, and goes without telling anybody. The parameters' own views are gone before an array is given back, since
# eviction points them elsewhere first. An array that is still read waits in ``_idle`` until somebody asks for its size;
# after an update, or where too much is idle, it is forgotten, so that its last reader frees it. What was forgotten is
# watched by weak references, because under a declared capacity memory counts until it is free. What torch counts for an
# array without readers is asked of a fresh one (``_UNSHARED``); where it cannot be asked (0) nothing is ever kept. Nor
# is it on CUDA, where the caching allocator does the same and knows of streams.
class ArrayPool:
    """Reuses flat host arrays: a fresh page costs about 2 microseconds per 4 KiB, a reused one nothing.

    An array comes back only when nobody else holds its storage; until then it waits. On CUDA torch's caching allocator
    does this already, so nothing is kept here.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self._keeps = device.type == "cpu" and _UNSHARED > 0
        self._idle: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._given_up: list[weakref.ref[torch.UntypedStorage]] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D array of ``numel`` elements."""
        idle = self._idle.get((numel, dtype), [])
        for index, array in enumerate(idle):
            if storage_holders(array) == _UNSHARED:
                return idle.pop(index)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, array: torch.Tensor) -> None:
        """Hand an array back; arrays that autograd still reads are kept apart until it lets go."""
        if self._keeps:
            idle = self._idle.setdefault((array.numel(), array.dtype), [])
            idle.append(array)
            # Sizes that come up seldom make room for the one that is in use now.
            for other in list(self._idle):
                while self.idle_bytes() > self.limit_bytes and self._idle[other]:
                    self._give_up([self._idle[other].pop(0)])

    def missing_bytes(self, wanted: Iterable[tuple[int, torch.dtype]]) -> int:
        """What :meth:`take` would have to allocate for these arrays, together."""
        free = {key: sum(storage_holders(array) == _UNSHARED for array in idle) for key, idle in self._idle.items()}
        missing = 0
        for numel, dtype in wanted:
            if free.get((numel, dtype), 0):
                free[numel, dtype] -= 1
            else:
                missing += numel * dtype.itemsize
        return missing

    def _give_up(self, arrays: Iterable[torch.Tensor]) -> None:
        """Forget arrays; those that are still read elsewhere are watched until their readers free them."""
        self._given_up += [weakref.ref(a.untyped_storage()) for a in arrays if storage_holders(a) != _UNSHARED]

    def read_bytes(self) -> int:
        """Bytes of arrays that are not kept here any more and are still read elsewhere."""
        alive = [(reference, reference()) for reference in self._given_up]
        self._given_up = [reference for reference, storage in alive if storage is not None]
        return sum(storage.nbytes() for _, storage in alive if storage is not None)

    def idle_bytes(self) -> int:
        """Bytes kept for reuse."""
        return sum(array.nbytes for idle in self._idle.values() for array in idle)

    def trim(self) -> None:
        """Forget idle arrays that are still read elsewhere, so that their readers free them."""
        for key, idle in self._idle.items():
            self._idle[key] = [array for array in idle if storage_holders(array) == _UNSHARED]
            self._give_up(idle)

    def drop(self) -> None:
        """Free all idle arrays."""
        for idle in self._idle.values():
            self._give_up(idle)
        self._idle.clear()
