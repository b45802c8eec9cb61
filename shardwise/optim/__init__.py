"""The Adam family: torch optimizers on torch's fused kernels, in tiles, without a compiler."""

from __future__ import annotations

from shardwise.optim.adam import CPUAdam, FusedAdam, HybridAdam
from shardwise.optim.adam_tiles import AdamRule, AdamSlot, AdamTiles, adam_reference
from shardwise.optim.offload import MomentStore

__all__ = [
    "AdamRule",
    "AdamSlot",
    "AdamTiles",
    "CPUAdam",
    "FusedAdam",
    "HybridAdam",
    "MomentStore",
    "adam_reference",
]
