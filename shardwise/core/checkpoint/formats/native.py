"""Write any checkpoint in the native format from a single process; see docs/checkpoint-format.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardwise.core.checkpoint.atomic import DISK
from shardwise.core.checkpoint.directory import CheckpointRoot
from shardwise.core.checkpoint.format import (
    PIECE_BYTES,
    Head,
    Manifest,
    PieceFile,
    PieceInfo,
    PieceLayout,
    merge_pieces,
    to_save,
)
from shardwise.core.checkpoint.formats.lazy import Entry, entries_of
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource
from shardwise.core.engine.fragments import Fragment, split

__all__ = ["write_native"]

# Entries that a restore reads; a foreign checkpoint has only some of them.
_EMPTY: dict[str, Any] = {
    "step": 0,
    "optimizers": [],
    "aliases": {},
    "compute_dtype": {},
    "scaler": None,
    "lr_schedulers": [],
    "user_state": None,
    "extra": {},
    "rng": [],
    "data_position": [],
    "buffers": [],
}


def write_native(source: CheckpointSource, path: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write ``source`` as the native checkpoint ``path``, with one piece (4 MiB) at a time in memory.

    Args:
        source: any checkpoint.
        path: the checkpoint's own directory; an earlier checkpoint there is replaced in one step.
        dtype: dtype of the model's floating-point tensors; ``None``: as stored.

    Raises:
        ValueError: ``path`` exists and is not a checkpoint, or its name cannot be a tag.
        CheckpointError: the source has no tensors, or a value that no load would accept.
        OSError: the path cannot be written; its earlier content is unchanged.
    """
    target = Path(path).absolute()
    entries = {name: _cast(name, entry, dtype) for name, entry in entries_of(source).items()}
    if not entries:
        raise CheckpointError(f"nothing to write to {target}: the checkpoint holds no tensors")
    state = {**_EMPTY, **source.state()}
    state.setdefault("updates", state["step"])
    root = CheckpointRoot(str(target.parent), DISK)
    serial = root.prepare(target.name)
    try:
        parts = [
            piece
            for name, entry in entries.items()
            for piece in split(Fragment(name, entry.fact.shape, entry.fact.dtype, 0, entry.fact.numel), PIECE_BYTES)
        ]
        file = PieceFile(DISK, os.path.join(root.hidden, "pieces-0.safetensors"), PieceLayout(parts))
        try:
            for index, part in enumerate(parts):
                file.write(index, entries[part.name].read(part.start, part.numel).contiguous())
            fact = file.finish()
        finally:
            file.abandon()
        facts = {name: entries[name].fact for name in sorted(entries)}
        pieces: dict[str, tuple[PieceInfo, ...]] = merge_pieces([file.pieces(0)])
        head = Head(target.name, serial, int(state["step"]))
        root.commit(to_save(Manifest(head, (fact,), facts, pieces, state)))
    except BaseException:
        root.discard()
        raise
    root.finish()
    return target


def _cast(name: str, entry: Entry, dtype: torch.dtype | None) -> Entry:
    return entry.cast(dtype if name.startswith("model/") and entry.fact.dtype.is_floating_point else None)
