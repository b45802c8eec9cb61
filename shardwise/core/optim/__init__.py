"""The Adam family, LAMB, Lion and Muon on torch's kernels, and what is known about any torch optimizer.

``element_wise`` finds out whether an optimizer updates each element on its own, ``state_form`` which state its class
makes, and when. Nothing here knows about chunks, shards or ranks: everything works on plain parameters too.
"""

from __future__ import annotations

from shardwise.core.optim.adam import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.optim.adam_tiles import AdamRule, AdamSlot, AdamTiles, adam_reference
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
