"""The Booster's plugins with their published arguments. ``docs/booster-plugins.md`` lists the differences."""

from __future__ import annotations

from shardwise.booster.plugin.base import DPPluginBase, Plugin, ShardedPlugin
from shardwise.booster.plugin.ddp import TorchDDPPlugin
from shardwise.booster.plugin.fsdp import TorchFSDPPlugin
from shardwise.booster.plugin.gemini import GeminiPlugin
from shardwise.booster.plugin.hybrid_parallel import HybridParallelPlugin
from shardwise.booster.plugin.low_level_zero import LowLevelZeroPlugin

__all__ = [
    "DPPluginBase",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "ShardedPlugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
