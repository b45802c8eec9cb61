"""Checkpoints: directories that all ranks write together, and the files of other libraries.

:class:`Checkpointer` saves and restores a whole run in the format of docs/checkpoint-format.md. :class:`PortableFiles`
saves and loads a model or an optimizer alone in formats that other libraries read
(:mod:`shardwise.core.checkpoint.formats`).

Tensors are global and have names. :class:`~shardwise.core.engine.checkpoint_state.EngineLocalState` says which part of
a tensor this rank holds, in which tier, and loads it. Only ``run`` and ``dcp_state`` look further into an engine.

* ``session``, ``portable``: the public operations; ``snapshot``: asynchronous saves.
* ``write``: what a rank saves, and the steps of a save. ``format``: the manifest and the files of pieces.
  ``directory``, ``atomic``: the directories on the disk.
* ``restore``: the steps of a load. ``load_plan``, ``options``, ``schedulers``: how a checkpoint fits a run, other names
  and numbers of rows included.
* ``run``, ``torch_run``: what a checkpoint needs to know of a run. ``source``, ``bounds``: what every reader has in
  common.
"""

from __future__ import annotations

from shardwise.core.checkpoint.formats.native import NativeSource, verify
from shardwise.core.checkpoint.portable import PortableFiles
from shardwise.core.checkpoint.restore import Restored
from shardwise.core.checkpoint.run import EngineRun, Ranks, Run
from shardwise.core.checkpoint.schedulers import SavedScheduler, read_lr_scheduler, write_lr_scheduler
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource, TensorInfo
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
    "TensorInfo",
    "TorchRun",
    "read_lr_scheduler",
    "verify",
    "write_lr_scheduler",
]
