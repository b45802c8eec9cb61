"""The Adam family, LAMB, Lion and Muon on torch's kernels, and analysis of arbitrary torch optimizers.

``element_wise`` tests whether an optimizer is element-wise, and ``state_form`` determines which state its class
creates, and when. This package is independent of chunks, shards and ranks: everything works on plain parameters, too.
"""

from __future__ import annotations

from shardwise.core.optim.adam import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.optim.adam_tiles import AdamRule, AdamSlot, AdamTiles, adam_reference

__all__ = [
    "AdamRule",
    "AdamSlot",
    "AdamTiles",
    "CPUAdam",
    "FusedAdam",
    "HybridAdam",
    "adam_reference",
]
