"""``from shardwise.nn.optimizer import HybridAdam``, as ``colossalai.nn.optimizer`` is imported from.

ColossalAI's other names can be imported, and say what to do when they are called.
"""

from __future__ import annotations

from typing import Any

from shardwise.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.optim.fused_sgd import FusedSGD
from shardwise.optim.lamb import FusedLAMB, Lamb
from shardwise.worlds import lookup, read_world

__all__ = ["CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb"]


def __getattr__(name: str) -> Any:
    return lookup(read_world("colossalai"), "nn.optimizer", name)
