"""Checkpoints: directories that all ranks write together, and whole files in torch's own shapes.

:class:`Checkpointer` saves and restores everything of a session in the format of docs/checkpoint-format.md. The
functions of :mod:`shardwise.checkpoint.whole` write single files (a model, an optimizer, a learning-rate scheduler) of
full, unpadded tensors under the names that plain PyTorch uses. Nothing is pickled when writing.
"""

from __future__ import annotations

from shardwise.checkpoint.agreement import on_every_rank, on_rank_zero
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.read import NativeSource, verify
from shardwise.checkpoint.restore import Restored
from shardwise.checkpoint.session import Checkpointer
from shardwise.checkpoint.source import CheckpointDamage, CheckpointSource, TensorFact
from shardwise.checkpoint.whole import (
    Shapes,
    align_model_state,
    check_optimizer_state,
    model_names,
    read_lr_scheduler,
    read_model,
    read_optimizer,
    target,
    write_lr_scheduler,
    write_model,
    write_optimizer,
)

__all__ = [
    "CheckpointDamage",
    "CheckpointError",
    "CheckpointSource",
    "Checkpointer",
    "NativeSource",
    "Restored",
    "Shapes",
    "TensorFact",
    "align_model_state",
    "check_optimizer_state",
    "model_names",
    "on_every_rank",
    "on_rank_zero",
    "read_lr_scheduler",
    "read_model",
    "read_optimizer",
    "target",
    "verify",
    "write_lr_scheduler",
    "write_model",
    "write_optimizer",
]
