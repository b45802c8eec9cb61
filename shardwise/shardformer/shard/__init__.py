"""What a model is cut over; the cutting itself, which asks policies, is in ``shardformer``."""

from shardwise.shardformer.shard.grad_ckpt_config import GradientCheckpointConfig, PipelineGradientCheckpointConfig
from shardwise.shardformer.shard.shard_config import ShardConfig

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig", "ShardConfig"]
