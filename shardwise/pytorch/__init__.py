"""Plans for programs with torch's ``DistributedDataParallel``, ``FullyShardedDataParallel`` or ``fully_shard``.

Each function takes the published arguments of one of them and returns the equivalent plan for
``shardwise.shard(model, optimizer, plan)``. Unsupported arguments raise an error or a warning that names them.
"""

from shardwise.pytorch.plans import plan_of_ddp, plan_of_fsdp, plan_of_fully_shard

__all__ = ["plan_of_ddp", "plan_of_fsdp", "plan_of_fully_shard"]
