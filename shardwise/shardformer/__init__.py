"""Tensor parallelism with ColossalAI's Shardformer interface: configurations, policies, and models sharded by them.

Published descriptions are translated into sharding rules of ``tensor``; this package has no layers or collectives.
"""

from shardwise.shardformer.policies import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardwise.shardformer.shard_config import GradientCheckpointConfig, PipelineGradientCheckpointConfig, ShardConfig
from shardwise.shardformer.shardformer import ShardFormer

__all__ = [
    "GradientCheckpointConfig",
    "ModulePolicyDescription",
    "PipelineGradientCheckpointConfig",
    "Policy",
    "ShardConfig",
    "ShardFormer",
    "SubModuleReplacementDescription",
]
