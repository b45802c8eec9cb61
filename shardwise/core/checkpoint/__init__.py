"""Checkpoints: directories that all ranks write together, and the files of other libraries.

:class:`Checkpointer` saves and restores a whole run in the format of docs/checkpoint-format.md. :class:`PortableFiles`
saves and loads a model or an optimizer alone in formats that other libraries read
(:mod:`shardwise.core.checkpoint.formats`).

Tensors are global and have names. :class:`~shardwise.core.engine.checkpoint_state.EngineLocalState` says which part of
a tensor this rank holds, in which tier, and loads it. Only ``training_run`` and ``dcp_state`` look further into an
engine.

* ``checkpointer``, ``portable_files``: the public operations; ``async_save``: asynchronous saves.
* ``save``: what a rank saves, and the steps of a save. ``native_format``: the manifest and the files of pieces.
  ``directory``, ``atomic``: the directories on the disk.
* ``load``: the steps of a load. ``load_plan``, ``plain_values``, ``schedulers``: how a checkpoint fits a run, other
  names and numbers of rows included.
* ``training_run``, ``torch_training_run``: what a checkpoint needs to know of a run. ``source``, ``input_checks``: what
  every reader has in common.
"""

from __future__ import annotations

from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.formats.native import NativeSource, verify
from shardwise.core.checkpoint.load import Restored
from shardwise.core.checkpoint.portable_files import PortableFiles
from shardwise.core.checkpoint.schedulers import SavedScheduler, read_lr_scheduler, write_lr_scheduler
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource, OpenSource, TensorInfo
from shardwise.core.checkpoint.torch_training_run import TorchRun
from shardwise.core.checkpoint.training_run import EngineRun, Ranks, Run

__all__ = [
    "CheckpointDamage",
    "CheckpointError",
    "CheckpointSource",
    "Checkpointer",
    "EngineRun",
    "NativeSource",
    "OpenSource",
    "PortableFiles",
    "Ranks",
    "Restored",
    "Run",
    "SavedScheduler",
    "TensorInfo",
    "TorchRun",
    "read_lr_scheduler",
    "verify",
    "write_lr_scheduler",
]
