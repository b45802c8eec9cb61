"""``from shardwise.nn.optimizer import HybridAdam``, as ``colossalai.nn.optimizer`` is imported from."""

from __future__ import annotations

from shardwise.optim import CPUAdam, FusedAdam, HybridAdam

__all__ = ["CPUAdam", "FusedAdam", "HybridAdam"]
