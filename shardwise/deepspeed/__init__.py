"""DeepSpeed's interface on shardwise's engine: ``import shardwise.deepspeed as deepspeed``."""

from __future__ import annotations

from shardwise.deepspeed import checkpointing, zero
from shardwise.deepspeed.config import Report
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.entry import add_config_arguments, initialize
from shardwise.deepspeed.plan import to_plan
from shardwise.mesh import init_distributed

__all__ = [
    "DeepSpeedEngine",
    "Report",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "to_plan",
    "zero",
]
