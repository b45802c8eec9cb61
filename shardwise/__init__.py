"""Sharded training for PyTorch: one engine, the interfaces people already use.

Start with :func:`shard`, or with :class:`shardwise.booster.Booster` and the plugins in :mod:`shardwise.booster.plugin`.
All names in ``__all__`` are public. Importing this package imports nothing else, so that the command line answers at
once: each name is imported from its module when it is first read.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.core.base.sizes import parse_size, size_text
    from shardwise.core.checkpoint import CheckpointDamage, Checkpointer, CheckpointError, CheckpointSource, OpenSource
    from shardwise.core.checkpoint.formats import Format, RefusedPickle, open_checkpoint, write_checkpoint, write_dcp

    # isort: split
    from shardwise.core.checkpoint.formats import register_format, write_huggingface, write_peft, write_single
    from shardwise.core.comm import PeerError
    from shardwise.core.deferred import deferred_init
    from shardwise.core.engine.memory_report import MemoryReport
    from shardwise.core.engine.module import ShardedModule
    from shardwise.core.engine.optimizer import ShardedOptimizer
    from shardwise.core.memory.disk import DiskError, Medium, register_medium
    from shardwise.core.memory.ledger import DeviceMemoryError
    from shardwise.core.memory.trace import MemStats, draw, draw_tiers, dump_memory_stats, tiers_text, timeline_text
    from shardwise.core.memory.trace.standalone import trace_memory
    from shardwise.core.mesh import Mesh, init_distributed, shutdown
    from shardwise.core.parallel.float8 import convert_to_float8_training
    from shardwise.core.parallel.pipeline.staging import Body, known_bodies, register_body
    from shardwise.core.parallel.sequence import SequenceBody, known_sequences, register_sequence
    from shardwise.core.parallel.tensor import Architecture, Attention, Embedding, Head, Mlp

    # isort: split
    from shardwise.core.parallel.tensor import known_architectures, propose_architecture, register_architecture
    from shardwise.plan import Plan
    from shardwise.session import Session, Settings, build, shard

__all__ = [
    "Architecture",
    "Attention",
    "Body",
    "CheckpointDamage",
    "CheckpointError",
    "CheckpointSource",
    "Checkpointer",
    "DeviceMemoryError",
    "DiskError",
    "Embedding",
    "Format",
    "Head",
    "Medium",
    "MemStats",
    "MemoryReport",
    "Mesh",
    "Mlp",
    "OpenSource",
    "PeerError",
    "Plan",
    "RefusedPickle",
    "SequenceBody",
    "Session",
    "Settings",
    "ShardedModule",
    "ShardedOptimizer",
    "__version__",
    "build",
    "convert_to_float8_training",
    "deferred_init",
    "draw",
    "draw_tiers",
    "dump_memory_stats",
    "init_distributed",
    "known_architectures",
    "known_bodies",
    "known_sequences",
    "open_checkpoint",
    "parse_size",
    "propose_architecture",
    "register_architecture",
    "register_body",
    "register_format",
    "register_medium",
    "register_sequence",
    "shard",
    "shutdown",
    "size_text",
    "tiers_text",
    "timeline_text",
    "trace_memory",
    "write_checkpoint",
    "write_dcp",
    "write_huggingface",
    "write_peft",
    "write_single",
]

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("shardwise needs Linux or macOS (it uses fcntl and forks): under Windows run it inside WSL")

_NAMES = {
    "session": "Session Settings build shard",
    "plan": "Plan",
    "core.mesh": "Mesh init_distributed shutdown",
    "core.comm": "PeerError",
    "core.deferred": "deferred_init",
    "core.checkpoint": "CheckpointDamage CheckpointError CheckpointSource Checkpointer OpenSource",
    "core.checkpoint.formats": (
        "Format RefusedPickle open_checkpoint register_format "
        "write_checkpoint write_dcp write_huggingface write_peft write_single"
    ),
    "core.parallel.tensor": (
        "Architecture Attention Embedding Head Mlp known_architectures propose_architecture register_architecture"
    ),
    "core.parallel.float8": "convert_to_float8_training",
    "core.parallel.pipeline.staging": "Body known_bodies register_body",
    "core.parallel.sequence": "SequenceBody known_sequences register_sequence",
    "core.engine.memory_report": "MemoryReport",
    "core.engine.module": "ShardedModule",
    "core.engine.optimizer": "ShardedOptimizer",
    "core.memory.disk": "DiskError Medium register_medium",
    "core.memory.ledger": "DeviceMemoryError",
    "core.memory.trace": "MemStats draw draw_tiers dump_memory_stats tiers_text timeline_text",
    "core.memory.trace.standalone": "trace_memory",
    "core.base.sizes": "parse_size size_text",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What it exports, and what of it has been imported."""
    modules = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *modules, *(name for name in globals() if name.startswith("__"))})
