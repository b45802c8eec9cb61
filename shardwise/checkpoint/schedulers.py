"""Learning-rate schedulers alone: their state as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import tree
from shardwise.checkpoint.files import CheckpointError, read_json
from shardwise.checkpoint.formats.detect import located
from shardwise.checkpoint.formats.output import output_file, write_text
from shardwise.checkpoint.formats.torch_file import TORCH_SUFFIXES, load_torch
from shardwise.checkpoint.formats.trainer import scheduler_files

__all__ = ["read_lr_scheduler", "write_lr_scheduler"]


def write_lr_scheduler(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a scheduler's ``state_dict()``.

    Raises:
        TypeError: the state holds something that JSON cannot; it is named.
        OSError: the file cannot be written; what stood there is still there.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = tree.encode(state, tensors)
    content = {"kind": "lr_scheduler", "state": encoded, "tensors": tree.inline(tensors)}
    text = json.dumps(content, indent=1, allow_nan=False)
    with output_file(Path(path)) as unfinished:
        write_text(unfinished, text)


def read_lr_scheduler(path: str | Path) -> dict[str, Any]:
    """The scheduler state in a file: our JSON, or a torch file (read with ``weights_only=True``). In a directory of
    Hugging Face's Trainer or of accelerate it is that of the first scheduler there.

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: the file is damaged, or is not a scheduler's.
    """
    source = Path(path)
    if source.is_dir():
        source = next(iter(scheduler_files(located(source))), source / "scheduler.pt")
    if source.suffix in TORCH_SUFFIXES:
        state = load_torch(source)
        if not isinstance(state, dict):
            raise CheckpointError(f"{source} holds a {type(state).__name__}, not a scheduler's state")
        return state
    data = read_json(source)
    if not isinstance(data, dict) or data.get("kind") != "lr_scheduler":
        raise CheckpointError(f"{source} is not a scheduler's file; give the one that save_lr_scheduler wrote")
    decoded: dict[str, Any] = tree.decode(data["state"], tree.outline(data["tensors"]))
    return decoded
