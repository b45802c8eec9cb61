"""ColossalAI's Shardformer, as far as tensor parallelism goes: configurations, policies, and a model cut by them.

What is published is translated here into cuts of ``tensor``; no layer and no collective is written here.
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
