"""A directory that a Trainer saved as the one file that ``LightningModule.load_from_checkpoint`` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import tree
from shardwise.checkpoint.formats import open_checkpoint
from shardwise.checkpoint.restore import StateTensors
from shardwise.strategies.saving import unpack

__all__ = ["to_single_file"]

MODEL = "model/"


def to_single_file(
    directory: str | os.PathLike[str], file: str | os.PathLike[str], weights_only: bool | None = None
) -> dict[str, Any]:
    """Write ``file`` with the full weights and what Lightning keeps beside them; one process, without a Trainer.

    Args:
        directory: a checkpoint of a strategy of ours, or of any format that has weights by name.
        file: replaced in one step if it exists.
        weights_only: ``False`` lets hyperparameters of any class be unpickled, which runs code that is in them.

    Returns:
        What was written: ``state_dict`` and Lightning's entries, without optimizer states.

    Raises:
        RuntimeError: an entry holds a class that may not be unpickled.
        CheckpointDamage: a file is damaged.
    """
    source = open_checkpoint(os.fspath(directory))
    try:
        facts, state = source.tensors(), source.state()
        weights = {
            name.removeprefix(MODEL): source.read(name, 0, fact.numel).reshape(fact.shape).clone()
            for name, fact in facts.items()
            if name.startswith(MODEL)
        }
        weights |= {other: weights[name] for other, name in state.get("aliases", {}).items() if name in weights}
        weights |= {name: tree.decode(value, StateTensors(source)) for name, value in state.get("extra", {}).items()}
        beside = unpack(tree.decode(state.get("user_state"), StateTensors(source)), weights_only)
    finally:
        source.close()
    whole = {"pytorch-lightning_version": "2.2.0", **beside, "state_dict": weights}
    partial = Path(f"{os.fspath(file)}.partial")
    torch.save(whole, partial)
    os.replace(partial, file)
    return whole
