"""``from shardwise.nn.optimizer import HybridAdam``, as ``colossalai.nn.optimizer`` is imported from.

ColossalAI's other names can be imported, and say what to do when they are called.
"""

from __future__ import annotations

from typing import Any

from shardwise.compat import alias_table, lookup
from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.optim.fused_sgd import FusedSGD
from shardwise.core.optim.lamb import FusedLAMB, Lamb

__all__ = ["CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb"]


def __getattr__(name: str) -> Any:
    return lookup(alias_table("colossalai"), "nn.optimizer", name)
