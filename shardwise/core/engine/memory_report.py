"""The memory that one model has allocated or reserved, by kind and tier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.core.engine.allocation import Storage
from shardwise.core.engine.mixed_precision import buffer_bytes
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.tier import Tier
from shardwise.core.memory.trace.tracker import sizes_of
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.update.tiles import TileStepper


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank's model data that are allocated now.

    Attributes:
        parameters_bytes: shards, and the unsharded parameters that stay gathered.
        secondary_bytes: secondary shards, see ``secondary`` of :class:`MeshPlan`.
        gathered_bytes: sharded parameters that are gathered now.
        peak_gathered_bytes: largest ``gathered_bytes`` so far.
        copied_bytes: the part of ``gathered_bytes`` that was copied. CPU ranks of one host may read each other's shards
            in place.
        peak_copied_bytes: largest ``copied_bytes`` so far.
        idle_bytes: host arrays for the next gather: at most two units, and the prefetched units.
        gradients_bytes: exchange buffers and reduced shards.
        master_bytes: fp32 masters of 16-bit parameters.
        optimizer_bytes: state of the optimizers, such as Adam's moments.
        buffers_bytes: the model's buffers.
        scratch_bytes: memory of the update, kept between steps: gradients of one tile in the update's dtype, and 8 MiB
            for copies of updated weights from the host to a GPU.
        waiting_bytes: host memory for parameters that were updated during backward with state on a disk, until
            ``step()``.
        by_tier: bytes of model data by tier (``"device"``, ``"host"``, ``"disk"``) and kind, without zeros.
        device_peak_bytes: peak of device memory; 0 without a limit of device memory.
        device_capacity_bytes: the limit of device memory; ``None`` if there is no limit.

    Examples:
        >>> report = session.memory()
        >>> state_bytes = report.master_bytes + report.optimizer_bytes
    """

    parameters_bytes: int
    secondary_bytes: int
    gathered_bytes: int
    peak_gathered_bytes: int
    copied_bytes: int
    peak_copied_bytes: int
    idle_bytes: int
    gradients_bytes: int
    master_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    scratch_bytes: int
    waiting_bytes: int
    by_tier: dict[str, dict[str, int]]
    device_peak_bytes: int
    device_capacity_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """The bytes of all model data in all tiers."""
        return sum(map(self.tier_bytes, self.by_tier))

    def tier_bytes(self, tier: str) -> int:
        """Return the bytes of all model data in a tier.

        Args:
            tier: ``"device"``, ``"host"`` or ``"disk"``.
        """
        return sum(self.by_tier.get(tier, {}).values())


class Accounts:
    """The memory of one model on this rank by kind and tier; the device's part goes to its ledger.

    Args:
        storage: the storage of parameters and masters.
        model: the module. Each storage of its buffers counts once.
        dtype: dtype of buffers; see :func:`dtype_of_buffer`.
        foreseen: all buffers are this rank's, so they count before the build puts them on the device.

    Attributes:
        steppers: the optimizers', whose state and scratch memory count.
    """

    def __init__(self, storage: Storage, model: nn.Module, dtype: torch.dtype | None, foreseen: bool) -> None:
        self._storage, self._model, self._device = storage, model, storage.mesh.device
        self.steppers: list[TileStepper] = []
        self._expected_bytes = self._buffers_bytes = self._to_come = 0
        """Bytes of optimizer state from the first step on, of buffers, and of buffers that the build will put on the
        device."""
        ledger = storage.ledger
        ledger.account("masters and optimizer state", self._device_bytes)
        ledger.account("update scratch", lambda: self._scratch_bytes(Tier.DEVICE))
        if ledger.capacity_bytes is not None:
            self._to_come = buffer_bytes(model, dtype) if foreseen else 0
            ledger.account("buffers", lambda: self._to_come + self._buffers_bytes)

    def expect(self, nbytes: int) -> None:
        """Reserve the bytes of state that an optimizer will have on the device from its first step on.

        Raises:
            DeviceMemoryError: together with everything else that stays there, this is more than the device has.
        """
        self._expected_bytes += nbytes
        self._storage.ledger.require(0, "the model and its optimizers")

    def look(self) -> None:
        """Look up the current buffers, since a program may have replaced some. Called before each forward pass."""
        here = [buffer for buffer in self._model.buffers() if buffer.device == self._device]
        self._to_come, self._buffers_bytes = 0, sum(sizes_of(here).values())
        for buffer in here:
            self._storage.ledger.charge(buffer)

    def reserved_bytes(self) -> int:
        """Return the bytes in the device's accounts that may not be allocated yet."""
        return max(self._expected_bytes - self.state_bytes(Tier.DEVICE)[1], 0) + self._to_come

    def _device_bytes(self) -> int:
        # State of later steps counts from the beginning: an error in the first step would come too late.
        masters, state = self.state_bytes(Tier.DEVICE)
        return masters + max(state, self._expected_bytes)

    def state_bytes(self, tier: Tier) -> tuple[int, int]:
        """Return the bytes of masters and of optimizer state in ``tier``."""
        return self._storage.master_bytes(tier), sum(each.state_bytes(tier) for each in self.steppers)

    def _scratch_bytes(self, tier: Tier) -> int:
        return sum(each.scratch_bytes(tier) for each in self.steppers) + self._storage.upload_slots.bytes(tier)

    def _in_tier(self, tier: Tier, pool: ChunkPool, reducer: Reducer) -> dict[str, int]:
        storage, on_device, (masters, state) = self._storage, tier is Tier.DEVICE, self.state_bytes(tier)
        # Buffers that are not on the device are on the host.
        there = {Tier.DEVICE: True, Tier.HOST: False}.get(tier)
        buffers = (each for each in self._model.buffers() if not each.is_meta)
        kinds = {
            "parameters": storage.parameter_bytes(tier),
            "secondary shards": storage.secondary_bytes(tier),
            "gathered parameters": pool.copied_bytes if on_device else 0,
            "idle arrays": pool.arrays.idle_bytes() if on_device else 0,
            "gradients": reducer.bytes(tier),
            "masters": masters,
            "optimizer state": state,
            "buffers": sum(sizes_of(each for each in buffers if (each.device == self._device) is there).values()),
            "update scratch": self._scratch_bytes(tier),
            "updated parameters": sum(each.nbytes for each in storage.new_shards.values()) if tier is Tier.HOST else 0,
        }
        return {kind: size for kind, size in kinds.items() if size}

    def report(self, pool: ChunkPool, reducer: Reducer) -> MemoryReport:
        """Count the bytes of model data that this rank holds now."""
        by_tier = {tier.value: self._in_tier(tier, pool, reducer) for tier in Tier}

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
            device_peak_bytes=self._storage.ledger.peak_bytes,
            device_capacity_bytes=self._storage.ledger.capacity_bytes,
        )
