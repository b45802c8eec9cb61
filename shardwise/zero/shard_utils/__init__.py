"""Which parameters are gathered together."""

from __future__ import annotations

from shardwise.zero.shard_utils.strategies import (
    BaseShardStrategy,
    BucketTensorShardStrategy,
    TensorShardStrategy,
)

__all__ = ["BaseShardStrategy", "BucketTensorShardStrategy", "TensorShardStrategy"]
