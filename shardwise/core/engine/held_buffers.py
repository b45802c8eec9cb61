"""What a model's buffers hold: statistics, masks and tables, which lie in no chunk."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from shardwise.core.base.torch_internals import no_torch_function, storage_id
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.memory.trace.tracker import sizes_of, storages

__all__ = ["HeldBuffers"]


class HeldBuffers:
    """The buffers of one model on this rank. Each storage counts once, at the size that it has when it is asked for.

    Args:
        model: the module.
        device: where a build puts them.
        ledger: the device's accounts, which have them where there is a capacity.
        dtype: what those of floating numbers are cast to; ``None``: they are left as they are.
        foreseen: they are all this rank's, so that they count before the build has put them on the device; those of
            other ranks' stages are let go of there.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, ledger: Ledger, dtype: torch.dtype | None, foreseen: bool
    ) -> None:
        self._model, self._device, self._ledger, self._dtype = model, device, ledger, dtype
        self._found: list[weakref.ref[torch.UntypedStorage]] = []
        self._to_come = 0
        """Bytes that the build will have put on the device, until it has."""
        if ledger.capacity_bytes is not None:
            self._to_come = self._foresee() if foreseen else 0
            ledger.watch("buffers", self._device_bytes)

    def _foresee(self) -> int:
        total, kept = 0, list[torch.Tensor]()
        with no_torch_function():  # those of a deferred construction have a shape, and no memory
            for buffer in self._model.buffers():
                cast = self._dtype is not None and buffer.is_floating_point() and buffer.dtype != self._dtype
                if not cast and not buffer.is_meta:
                    kept.append(buffer)
                    continue
                itemsize = self._dtype.itemsize if cast and self._dtype is not None else buffer.element_size()
                total += buffer.numel() * itemsize
            return total + sum(sizes_of(kept).values())

    def look(self) -> None:
        """Those of now are the ones that count: a program may have put others in their places.

        What a pass makes and puts into a place is seen by who measures the pass, and what it replaces is gone, so once
        before each forward pass is enough.
        """
        self._to_come = 0
        found = dict[int, torch.UntypedStorage]()
        for buffer in self._model.buffers():
            if buffer.device == self._device:
                found.update((storage_id(storage), storage) for storage in storages(buffer))
                self._ledger.claim(buffer)
        self._found = [weakref.ref(storage) for storage in found.values()]

    def _device_bytes(self) -> int:
        alive = (found() for found in self._found)
        return self._to_come + sum(storage.nbytes() for storage in alive if storage is not None)

    def foreseen_bytes(self) -> int:
        """Those in the device's accounts that may not be there yet."""
        return self._to_come

    def bytes(self, tier: Tier) -> int:
        """Those in ``tier``, as they are now: what is not on the device is on the host."""
        there = {Tier.DEVICE: True, Tier.HOST: False}.get(tier)
        buffers = (each for each in self._model.buffers() if not each.is_meta)
        return sum(sizes_of(each for each in buffers if (each.device == self._device) is there).values())
