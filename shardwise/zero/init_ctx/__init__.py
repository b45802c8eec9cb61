"""Building a model that is about to be sharded."""

from __future__ import annotations

from shardwise.zero.init_ctx.init_context import (
    ParameterMark,
    ZeroInitContext,
    no_shard_zero_context,
    no_shard_zero_decrator,
)

__all__ = ["ParameterMark", "ZeroInitContext", "no_shard_zero_context", "no_shard_zero_decrator"]
