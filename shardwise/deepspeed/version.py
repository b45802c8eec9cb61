"""The release of DeepSpeed that this interface follows, for programs that check the version."""

from __future__ import annotations

from shardwise.compat import alias_table

__version__ = version = alias_table("deepspeed").version
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("."))
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""A file of variables that DeepSpeed's launcher reads."""
