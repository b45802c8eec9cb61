"""Checkpoints: directories that all ranks write together, and files of other libraries as views of the same stream.

:class:`Checkpointer` saves and restores everything of a run in the format of docs/checkpoint-format.md.
:class:`PortableFiles` saves and loads a model or an optimizer alone, in formats that other libraries read
(:mod:`shardwise.core.checkpoint.formats`).

Tensors are global here, by name. Which part of one a rank holds, in which tier, and how it is put back is asked of
:mod:`shardwise.core.engine.fragments`; beside that only ``run``, ``frozen`` and ``dcp_state`` look into an engine.
"""

from __future__ import annotations

from shardwise.core.checkpoint.portable import PortableFiles
from shardwise.core.checkpoint.read import NativeSource, verify
from shardwise.core.checkpoint.restore import Restored
from shardwise.core.checkpoint.run import EngineRun, Ranks, Run
from shardwise.core.checkpoint.schedulers import SavedScheduler, read_lr_scheduler, write_lr_scheduler
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource, TensorFact
from shardwise.core.checkpoint.torch_run import TorchRun

__all__ = [
    "CheckpointDamage",
    "CheckpointError",
    "CheckpointSource",
    "Checkpointer",
    "EngineRun",
    "NativeSource",
    "PortableFiles",
    "Ranks",
    "Restored",
    "Run",
    "SavedScheduler",
    "TensorFact",
    "TorchRun",
    "read_lr_scheduler",
    "verify",
    "write_lr_scheduler",
]
