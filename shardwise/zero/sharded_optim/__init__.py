"""The optimizer of a sharded model."""

from __future__ import annotations

from shardwise.zero.sharded_optim.sharded_optim_v2 import ShardedOptimizerV2

__all__ = ["ShardedOptimizerV2"]
