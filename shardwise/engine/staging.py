"""Gathering a private shard once, for states and inspection."""

from __future__ import annotations

import torch

from shardwise.comm import Group

__all__ = ["gather_shards"]


def gather_shards(group: Group, shard: torch.Tensor) -> torch.Tensor:
    """All ranks' equally long 1-D ``shard`` tensors (any float dtype) in rank order, a new tensor. Collective."""
    if group.size == 1:
        return shard.clone()
    staging = group.buffers([(shard.numel(), shard.dtype)])[0]
    staging.local.copy_(shard)
    group.fence()
    out = torch.empty(group.size * shard.numel(), dtype=shard.dtype, device=shard.device)
    group.all_gather(out, staging).wait()
    group.fence()
    return out
