"""Whole-file checkpoints: one safetensors file for a model, one for an optimizer, JSON for a learning-rate scheduler.

Files hold full, unpadded tensors under the names that plain PyTorch uses, so a checkpoint written by one plugin is
read by any other and by any world size. Nothing is pickled when writing.
"""

from __future__ import annotations

from shardwise.checkpoint.agreement import on_every_rank, on_rank_zero
from shardwise.checkpoint.files import CheckpointError
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
    "CheckpointError",
    "Shapes",
    "align_model_state",
    "check_optimizer_state",
    "model_names",
    "on_every_rank",
    "on_rank_zero",
    "read_lr_scheduler",
    "read_model",
    "read_optimizer",
    "target",
    "write_lr_scheduler",
    "write_model",
    "write_optimizer",
]
