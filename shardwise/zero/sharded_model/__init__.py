"""The sharded model."""

from __future__ import annotations

from shardwise.zero.sharded_model.sharded_model_v2 import ShardedModelV2

__all__ = ["ShardedModelV2"]
