"""DeepSpeed's interface on shardwise's engine: ``import shardwise.deepspeed as deepspeed``.

DeepSpeed's other names and modules come from the table ``shardwise/compat/deepspeed.toml``.
"""

from __future__ import annotations

from shardwise.compat import alias_table, install_aliases
from shardwise.deepspeed import checkpointing, zero
from shardwise.deepspeed.collectives import init_distributed
from shardwise.deepspeed.config import AssertedError, Report
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.initialization import add_config_arguments, initialize
from shardwise.deepspeed.plan import to_plan

__all__ = [
    "AssertedError",
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

_NAMES = alias_table("deepspeed")
__version__ = version = _NAMES.version
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("."))
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""A file of variables that DeepSpeed's launcher reads."""
__getattr__ = install_aliases(_NAMES)
