"""Hugging Face's ``accelerate`` and ``transformers.Trainer`` with a shardwise plan.

Their packages are imported at first use. ``pip install 'shardwise[hf]'`` installs both.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["MetricsCallback", "Prepared", "ShardwiseAccelerator", "ShardwiseTrainer", "prepare", "sharded_trainer"]

_WHERE = dict.fromkeys(("Prepared", "ShardwiseAccelerator", "prepare"), "accelerator")
_WHERE |= dict.fromkeys(("MetricsCallback", "ShardwiseTrainer", "sharded_trainer"), "trainer")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        module = import_module(f"{__name__}.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("accelerate", "transformers"):
            raise
        raise ImportError(f"{name} needs {error.name}: pip install 'shardwise[hf]'") from error
    return getattr(module, name)
