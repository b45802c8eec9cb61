"""ColossalAI's older sharded-model interface (``zero.sharded_model``) on shardwise's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.core.base.validate import as_mapping
from shardwise.zero.init_ctx import ZeroInitContext, no_shard_zero_context, no_shard_zero_decrator
from shardwise.zero.shard_utils import BucketTensorShardStrategy, TensorShardStrategy
from shardwise.zero.sharded_model import ShardedModelV2
from shardwise.zero.sharded_optim import ShardedOptimizerV2

__all__ = [
    "BucketTensorShardStrategy",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "TensorShardStrategy",
    "ZeroInitContext",
    "convert_to_zero_v2",
    "no_shard_zero_context",
    "no_shard_zero_decrator",
]


def convert_to_zero_v2(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_config: Mapping[str, Any] | None,
    optimizer_config: Mapping[str, Any] | None,
) -> tuple[ShardedModelV2, ShardedOptimizerV2]:
    """Return the wrapped model and optimizer.

    ``model_config`` has arguments of :class:`ShardedModelV2`, ``optimizer_config`` those of the optimizer.

    Examples:
        >>> from shardwise.zero import TensorShardStrategy, ZeroInitContext, convert_to_zero_v2
        >>> strategy = TensorShardStrategy()
        >>> with ZeroInitContext("cpu", strategy, shard_param=True, convert_fp16=False):
        ...     model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model, optimizer = convert_to_zero_v2(model, optimizer, {"shard_strategy": strategy}, {})
        >>> optimizer.backward(criterion(model(inputs), targets))
        >>> optimizer.step()
    """
    for name, config in (("model_config", model_config), ("optimizer_config", optimizer_config)):
        as_mapping(name, config or {}, "a dict of arguments, or None")
    sharded = ShardedModelV2(model, **(model_config or {}))
    return sharded, ShardedOptimizerV2(sharded, optimizer, **(optimizer_config or {}))
