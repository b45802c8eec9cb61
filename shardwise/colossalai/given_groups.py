"""The groups of ranks that programs give to models which they wrap by hand."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.booster.plugin import ShardedPlugin
from shardwise.comm import ranks_of

__all__ = ["check_groups"]


def check_groups(shard: dist.ProcessGroup | None, replicate: dist.ProcessGroup | None) -> int:
    """How many replicas the groups mean, which have to be those that a plan of that many makes.

    Args:
        shard: the ranks that a model's state is divided over; ``None``: all.
        replicate: the ranks with the same part of it; ``None``: this one.

    Raises:
        ValueError: a group that this rank does not belong to, or ranks that are not neighbours.
    """
    if shard is None and replicate is None:
        return 1
    every = ranks_of("group", None)
    own = ranks_of("the group that shards", shard)
    copies = 1 if replicate is None else len(ranks_of("the group of replicas", replicate))
    start = own[0]
    if own != tuple(range(start, start + len(own))) or start % len(own) or len(own) * copies != len(every):
        raise ValueError(
            f"a group of ranks {list(own)} in {copies} copies among {len(every)} ranks: give neighbours, such as "
            f"ProcessGroupMesh(copies, ranks).get_group_along_axis(1), that are all ranks together; other groups need "
            f"programs of their own ({ShardedPlugin.__name__}s of shardwise.booster divide all ranks)"
        )
    return copies
