"""What holds how many bytes of model data on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.engine.engine import Engine
from shardwise.core.memory.tier import Tier

__all__ = ["MemoryReport", "memory_report"]


@dataclass(frozen=True)
class MemoryReport:
    """Live bytes of this rank's model data by kind, over all tiers."""

    parameters_bytes: int
    """Shards and, where parameters stay gathered, the whole arrays."""
    secondary_bytes: int
    """Parts of a second copy, which later gathers are made of; see :attr:`MeshPlan.secondary`."""
    gathered_bytes: int
    """Sharded chunks that are gathered right now."""
    peak_gathered_bytes: int
    copied_bytes: int
    """What of ``gathered_bytes`` takes memory: CPU ranks of one host may read each other's shards as one array."""
    peak_copied_bytes: int
    idle_bytes: int
    """Host arrays kept for the next gather, at most two units and what is fetched ahead."""
    gradients_bytes: int
    """Exchange buffers and reduced shards."""
    master_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    """The model's buffers."""
    waiting_bytes: int
    """Host memory for parameters whose update, on a disk, is made during backward; they count from ``step()`` on."""
    by_tier: dict[str, dict[str, int]]
    """The same by tier (``"device"``, ``"host"``, ``"disk"``) and kind; only what is not 0."""
    device_peak_bytes: int
    """The most that the device held at any check; 0 without a capacity."""
    device_capacity_bytes: int | None
    """What the plan declares; ``None``: no limit."""

    @property
    def total_bytes(self) -> int:
        parameters = self.parameters_bytes + self.secondary_bytes + self.copied_bytes + self.idle_bytes
        state = self.master_bytes + self.optimizer_bytes + self.buffers_bytes
        return parameters + self.gradients_bytes + state + self.waiting_bytes

    def tier_bytes(self, tier: str) -> int:
        """All model data in ``tier``."""
        return sum(self.by_tier.get(tier, {}).values())


def _in_tier(engine: Engine, tier: Tier) -> dict[str, int]:
    masters, state = engine.accounts.state_bytes(tier)
    on_device = tier is Tier.DEVICE
    kinds = {
        "parameters": engine.storage.parameter_bytes(tier),
        "secondary shards": engine.storage.secondary_bytes(tier),
        "gathered parameters": engine.pool.copied_bytes if on_device else 0,
        "idle arrays": engine.pool.arrays.idle_bytes() if on_device else 0,
        "gradients": engine.reducer.bytes(tier),
        "masters": masters,
        "optimizer state": state,
        "buffers": engine.buffers.bytes(tier),
        "updated parameters": engine.storage.new_shard_bytes(tier),
    }
    return {kind: size for kind, size in kinds.items() if size}


def memory_report(engine: Engine) -> MemoryReport:
    """Count them now."""
    by_tier = {tier.value: _in_tier(engine, tier) for tier in Tier}

    def total(kind: str) -> int:
        return sum(kinds.get(kind, 0) for kinds in by_tier.values())

    return MemoryReport(
        parameters_bytes=total("parameters"),
        secondary_bytes=total("secondary shards"),
        gathered_bytes=engine.pool.gathered_bytes,
        peak_gathered_bytes=engine.pool.peak_gathered_bytes,
        copied_bytes=engine.pool.copied_bytes,
        peak_copied_bytes=engine.pool.peak_copied_bytes,
        idle_bytes=total("idle arrays"),
        gradients_bytes=total("gradients"),
        master_bytes=total("masters"),
        optimizer_bytes=total("optimizer state"),
        buffers_bytes=total("buffers"),
        waiting_bytes=total("updated parameters"),
        by_tier=by_tier,
        device_peak_bytes=engine.ledger.peak_bytes,
        device_capacity_bytes=engine.ledger.capacity_bytes,
    )
