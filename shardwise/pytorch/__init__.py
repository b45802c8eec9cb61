"""For those who come from torch's own ``DistributedDataParallel``, ``FullyShardedDataParallel`` and ``fully_shard``.

Each function takes the published arguments of one of them and gives the plan that they mean, for
``shardwise.shard(model, optimizer, plan)``. What a plan does not say is an error or a warning that names it.
"""

from shardwise.pytorch.plans import plan_of_ddp, plan_of_fsdp, plan_of_fully_shard

__all__ = ["plan_of_ddp", "plan_of_fsdp", "plan_of_fully_shard"]
