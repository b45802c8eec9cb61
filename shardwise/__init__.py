"""Sharded training for PyTorch: one engine, the interfaces people already use.

Start with :func:`shard`, or with :class:`shardwise.booster.Booster` and the plugins in :mod:`shardwise.booster.plugin`.
Importing this package imports nothing else, so that the command line answers at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.build import Session
    from shardwise.native import shard
    from shardwise.plan import Plan

__all__ = ["Plan", "Session", "__version__", "shard"]

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("shardwise needs Linux or macOS (it uses fcntl and forks): under Windows run it inside WSL")

_HOMES = {"shard": "shardwise.native", "Plan": "shardwise.plan", "Session": "shardwise.build"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What it exports, and what of it has been imported."""
    modules = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *modules, *(name for name in globals() if name.startswith("__"))})
