"""Strategies for ``pytorch_lightning``. Importing this registers their names with ``Trainer(strategy=...)``."""

from __future__ import annotations

from typing import Any

from shardwise.compat import alias_table, install_aliases
from shardwise.strategies import strategy_registry
from shardwise.strategies.consolidate_checkpoint import convert_zero_checkpoint_to_fp32_state_dict, to_single_file
from shardwise.strategies.fully_sharded import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap
from shardwise.strategies.lightning_packages import PYTORCH_LIGHTNING

__all__ = [
    "ColossalAIPrecisionPlugin",
    "ColossalAIStrategy",
    "DDPFullyShardedStrategy",
    "DeepSpeedStrategy",
    "MetricsCallback",
    "ShardedPrecision",
    "auto_wrap",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "default_auto_wrap_policy",
    "enable_wrap",
    "take_over_deepspeed_names",
    "to_single_file",
    "wrap",
]

_classes: Any = strategy_registry.register(PYTORCH_LIGHTNING)
ColossalAIPrecisionPlugin, ColossalAIStrategy, DDPFullyShardedStrategy, DeepSpeedStrategy, *_classes = _classes
MetricsCallback, ShardedPrecision = _classes


def take_over_deepspeed_names() -> None:
    """Make ``strategy="deepspeed"`` and ``"deepspeed_stage_..."`` mean :class:`DeepSpeedStrategy` of this package."""
    strategy_registry.take_over_deepspeed_names(PYTORCH_LIGHTNING)


__getattr__ = install_aliases(alias_table("pytorch_lightning"))
