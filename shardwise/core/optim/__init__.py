"""The Adam family, on torch's fused kernels, in tiles, without a compiler; and what any torch optimizer is like.

The second is for those who step or load others' optimizers: whether elements are updated apart (``element_wise``),
which state a class makes, and when (``state_form``). Nothing here knows of chunks, shards or ranks: all of these work
on plain parameters, too.
"""

from __future__ import annotations

from shardwise.core.optim.adam import CPUAdam, FusedAdam
from shardwise.core.optim.adam_tiles import AdamRule, AdamSlot, AdamTiles, adam_reference
from shardwise.core.optim.hybrid_adam import HybridAdam
from shardwise.core.optim.offload import MomentStore

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
