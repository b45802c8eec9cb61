"""A plugin for the Booster: ZeRO-3 or ZeRO-2 in bf16, selected by one argument."""

import torch

from shardwise.booster.plugin import ShardedPlugin
from shardwise.plan import Plan, zero


class HalfPlugin(ShardedPlugin):
    """Train in bf16 with fp32 masters.

    Args:
        shard_parameters: keep only a shard of the parameters between uses (ZeRO-3); otherwise all of them (ZeRO-2).

    Raises:
        TypeError: ``shard_parameters`` is not a bool.
    """

    def __init__(self, shard_parameters: bool = True) -> None:
        if not isinstance(shard_parameters, bool):
            raise TypeError(f"shard_parameters={shard_parameters!r}: give True or False")
        self._stage = 3 if shard_parameters else 2

    def plan(self, world_size: int) -> Plan:
        """Return the plan, which is the same for any number of ranks."""
        return zero(self._stage, torch.bfloat16)

    def support_no_sync(self) -> bool:
        """Return False: gradients are reduced in each pass."""
        return False
