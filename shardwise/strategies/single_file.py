"""A directory that a Trainer saved as the one file that ``LightningModule.load_from_checkpoint`` reads."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from shardwise.checkpoint import tree
from shardwise.checkpoint.formats import open_checkpoint
from shardwise.checkpoint.formats.output import output_file, write_torch
from shardwise.checkpoint.source import StateTensors
from shardwise.strategies.entries import left_out, unpack

__all__ = ["to_single_file"]

MODEL = "model/"


def to_single_file(directory: str | os.PathLike[str], file: str | os.PathLike[str]) -> dict[str, Any]:
    """Write ``file`` with the full weights and what Lightning keeps beside them; one process, without a Trainer.

    Args:
        directory: a checkpoint of a strategy of ours, or of any format that has weights by name.
        file: replaced in one step if it exists. It is a file of ``torch.save``, as Lightning's are: a pickle.

    Returns:
        What was written: ``state_dict`` and Lightning's entries, without optimizer states and without hyperparameters
        that the directory lacks (a warning names them).

    Raises:
        CheckpointDamage: a file is damaged.
        OSError: ``file`` cannot be written; what stood there is still there.
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
        user_state = tree.decode(state.get("user_state"), StateTensors(source))
    finally:
        source.close()
    missing = left_out(user_state)
    if missing:
        warnings.warn(
            f"{os.fspath(directory)} was saved without {', '.join(missing)}: give these hyperparameters to "
            "load_from_checkpoint",
            stacklevel=2,
        )
    whole = {"pytorch-lightning_version": "2.2.0", **unpack(user_state), "state_dict": weights}
    with output_file(Path(file)) as unfinished:
        write_torch(unfinished, whole)
    return whole
