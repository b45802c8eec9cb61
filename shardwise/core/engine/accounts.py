"""Accounts of one model's memory by kind and tier: optimizer state, buffers, and the report of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.core.base.torch_internals import no_torch_function
from shardwise.core.engine.casts import dtype_of_buffer
from shardwise.core.engine.storage import Storage
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.ledger import Ledger
from shardwise.core.memory.tier import Tier
from shardwise.core.memory.trace.tracker import sizes_of
from shardwise.core.shards.pool import ChunkPool


class StateAccounts:
    """Masters, optimizer state and scratch memory of one model on this rank; the device's part goes to its ledger.

    Args:
        storage: of the masters.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._state: list[Callable[[Tier], int]] = []
        self._scratch: list[Callable[[Tier], int]] = []
        self._expected_bytes = 0
        storage.ledger.account("masters and optimizer state", self._device_bytes)
        storage.ledger.account("update scratch", lambda: self.scratch_bytes(Tier.DEVICE))

    def hold(self, state_bytes: Callable[[Tier], int], scratch_bytes: Callable[[Tier], int]) -> None:
        """Register an optimizer's functions for its bytes of state and of scratch memory in a tier."""
        self._state.append(state_bytes)
        self._scratch.append(scratch_bytes)

    def expect(self, nbytes: int) -> None:
        """Reserve the bytes of state that an optimizer will have on the device from its first step on.

        Raises:
            DeviceMemoryError: together with everything else that stays there, this is more than the device has.
        """
        self._expected_bytes += nbytes
        self._storage.ledger.require(0, "the model and its optimizers")

    def _device_bytes(self) -> int:
        masters, state = self.state_bytes(Tier.DEVICE)
        # State of later steps counts from the beginning: an error in the first step would come too late.
        return masters + max(state, self._expected_bytes)

    def foreseen_bytes(self) -> int:
        """Return the bytes of optimizer state on the device that are reserved and not allocated yet."""
        return max(self._expected_bytes - self.state_bytes(Tier.DEVICE)[1], 0)

    def state_bytes(self, tier: Tier) -> tuple[int, int]:
        """Return the bytes of masters and of optimizer state in ``tier``."""
        return self._storage.master_bytes(tier), sum(ask(tier) for ask in self._state)

    def scratch_bytes(self, tier: Tier) -> int:
        """Return the scratch bytes of updates in ``tier``."""
        return sum(ask(tier) for ask in self._scratch) + self._storage.upload_slots.bytes(tier)


class HeldBuffers:
    """The buffers of one model on this rank. Each storage counts once.

    Args:
        model: the module.
        device: where a build puts them.
        ledger: accounts of device memory, which include them under a capacity.
        dtype: see :func:`dtype_of_buffer`.
        foreseen: all of them are this rank's, so they count before the build puts them on the device.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, ledger: Ledger, dtype: torch.dtype | None, foreseen: bool
    ) -> None:
        self._model, self._device, self._ledger, self._dtype = model, device, ledger, dtype
        self._held_bytes = self._to_come = 0
        """Bytes that the build will put on the device."""
        if ledger.capacity_bytes is not None:
            self._to_come = self._estimate() if foreseen else 0
            ledger.account("buffers", lambda: self._to_come + self._held_bytes)

    def _estimate(self) -> int:
        total, tensors = 0, list[torch.Tensor]()
        with no_torch_function():  # buffers of a deferred construction have no memory
            for buffer in self._model.buffers():
                dtype = dtype_of_buffer(buffer, self._dtype)
                if dtype == buffer.dtype and not buffer.is_meta:
                    tensors.append(buffer)
                else:
                    total += buffer.numel() * dtype.itemsize
            return total + sum(sizes_of(tensors).values())

    def look(self) -> None:
        """Look up the current buffers, since a program may have replaced some. Called before each forward pass."""
        here = [buffer for buffer in self._model.buffers() if buffer.device == self._device]
        self._to_come, self._held_bytes = 0, sum(sizes_of(here).values())
        for buffer in here:
            self._ledger.charge(buffer)

    def foreseen_bytes(self) -> int:
        """Return the bytes in the device's accounts that may not be allocated yet."""
        return self._to_come

    def bytes(self, tier: Tier) -> int:
        """Return the current bytes in ``tier``; buffers that are not on the device are on the host."""
        there = {Tier.DEVICE: True, Tier.HOST: False}.get(tier)
        buffers = (each for each in self._model.buffers() if not each.is_meta)
        return sum(sizes_of(each for each in buffers if (each.device == self._device) is there).values())


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank's model data that are allocated now, by kind; ``by_tier`` has them by tier and kind."""

    parameters_bytes: int
    """Shards, and the unsharded parameters that stay gathered."""
    secondary_bytes: int
    """Secondary shards; see :attr:`MeshPlan.secondary`."""
    gathered_bytes: int
    """Sharded chunks that are gathered right now."""
    peak_gathered_bytes: int
    copied_bytes: int
    """The part of ``gathered_bytes`` that was copied. CPU ranks of one host may read each other's shards in place."""
    peak_copied_bytes: int
    idle_bytes: int
    """Host arrays kept for the next gather: at most two units, and the prefetched ones."""
    gradients_bytes: int
    """Exchange buffers and reduced shards."""
    master_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    """The model's buffers."""
    scratch_bytes: int
    """Memory of the update, kept between steps: gradients of one tile in the update's dtype, and 8 MiB for copies of
    updated weights from the host to a GPU."""
    waiting_bytes: int
    """Host memory for parameters that were updated during backward with state on a disk, until ``step()``."""
    by_tier: dict[str, dict[str, int]]
    """The same by tier (``"device"``, ``"host"``, ``"disk"``) and kind, without zeros."""
    device_peak_bytes: int
    """Peak of device memory; 0 without a declared capacity."""
    device_capacity_bytes: int | None
    """The capacity in the plan; ``None``: no limit."""

    @property
    def total_bytes(self) -> int:
        return sum(map(self.tier_bytes, self.by_tier))

    def tier_bytes(self, tier: str) -> int:
        """All model data in ``tier``."""
        return sum(self.by_tier.get(tier, {}).values())


def memory_report(
    storage: Storage, accounts: StateAccounts, pool: ChunkPool, reducer: Reducer, buffers: HeldBuffers
) -> MemoryReport:
    """Count the bytes of model data that this rank holds now."""

    def in_tier(tier: Tier) -> dict[str, int]:
        masters, state = accounts.state_bytes(tier)
        on_device = tier is Tier.DEVICE
        kinds = {
            "parameters": storage.parameter_bytes(tier),
            "secondary shards": storage.secondary_bytes(tier),
            "gathered parameters": pool.copied_bytes if on_device else 0,
            "idle arrays": pool.arrays.idle_bytes() if on_device else 0,
            "gradients": reducer.bytes(tier),
            "masters": masters,
            "optimizer state": state,
            "buffers": buffers.bytes(tier),
            "update scratch": accounts.scratch_bytes(tier),
            "updated parameters": storage.new_shard_bytes(tier),
        }
        return {kind: size for kind, size in kinds.items() if size}

    by_tier = {tier.value: in_tier(tier) for tier in Tier}

    def total(kind: str) -> int:
        return sum(kinds.get(kind, 0) for kinds in by_tier.values())

    return MemoryReport(
        parameters_bytes=total("parameters"),
        secondary_bytes=total("secondary shards"),
        gathered_bytes=pool.gathered_bytes,
        peak_gathered_bytes=pool.peak_gathered_bytes,
        copied_bytes=pool.copied_bytes,
        peak_copied_bytes=pool.peak_copied_bytes,
        idle_bytes=total("idle arrays"),
        gradients_bytes=total("gradients"),
        master_bytes=total("masters"),
        optimizer_bytes=total("optimizer state"),
        buffers_bytes=total("buffers"),
        scratch_bytes=total("update scratch"),
        waiting_bytes=total("updated parameters"),
        by_tier=by_tier,
        device_peak_bytes=storage.ledger.peak_bytes,
        device_capacity_bytes=storage.ledger.capacity_bytes,
    )
