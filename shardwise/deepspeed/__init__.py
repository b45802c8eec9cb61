"""DeepSpeed's interface on shardwise's engine: ``import shardwise.deepspeed as deepspeed``.

DeepSpeed's other names and modules come from the table ``shardwise/compat/deepspeed.toml``.
"""

from __future__ import annotations

from shardwise.compat import alias_table, install_aliases
from shardwise.deepspeed import checkpointing, zero
from shardwise.deepspeed.collectives import init_distributed
from shardwise.deepspeed.config import Report
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.entry import add_config_arguments, initialize
from shardwise.deepspeed.plan import to_plan
from shardwise.deepspeed.version import __version__

__all__ = [
    "DeepSpeedEngine",
    "Report",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "to_plan",
    "zero",
]

__getattr__ = install_aliases(alias_table("deepspeed"))
