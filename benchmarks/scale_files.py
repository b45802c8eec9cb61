"""Checkpoints of many ranks: what each rank tells of its file, the manifest that is made of it, and how it is read."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.core.checkpoint.formats.native import NativeSource
from shardwise.core.checkpoint.native_format import (
    MANIFEST,
    FileInfo,
    Head,
    Manifest,
    PieceInfo,
    encode_manifest,
    merge_pieces,
)
from shardwise.core.checkpoint.source import TensorInfo
from shardwise.core.shards.layout import Layout, ParamInfo, make_layout
from shardwise.plan import ByModule

__all__ = ["Files", "files_of"]

WIDTH = 1024
KINDS = ("model/{}", "optimizer/0/{}/exp_avg", "optimizer/0/{}/exp_avg_sq")


@dataclass(frozen=True)
class Files:
    """Of a checkpoint at stage 3, with Adam.

    Attributes:
        pieces: in the manifest.
        part_bytes: what one rank tells of its file (JSON), which all ranks get.
        manifest_bytes: of the manifest, which rank 0 writes and every rank reads.
        assemble_s: from all ranks' parts to the bytes of the manifest, on rank 0.
        read_s: from the manifest to a checkpoint that can be read, on each rank; with a look at each file's size.
        wanted: pieces that a rank of three quarters as many reads from.
        find_s: to find these.
    """

    ranks: int
    pieces: int
    part_bytes: int
    manifest_bytes: int
    assemble_s: float
    read_s: float
    wanted: int
    find_s: float


def _layout(blocks: int, ranks: int) -> Layout:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks)))
    facts = [ParamInfo((name,), param.shape, torch.float32, True, 0, 0) for name, param in model.named_parameters()]
    return make_layout(facts, model, ByModule(unit_classes=()), ranks, 1)


def _held(layout: Layout, rank: int) -> Iterator[tuple[str, int, int]]:
    """Of each parameter that the rank has some of: its name, where that begins, and how much it is."""
    for spec in layout.chunks:
        first, last = spec.bounds[rank], spec.bounds[rank + 1]
        for slot in spec.slots:
            start, end = max(slot.start, first), min(slot.end, last)
            if start < end:
                yield layout.facts[slot.param].names[0], start - slot.start, end - start


def _part(layout: Layout, rank: int) -> tuple[dict[str, Any], int]:
    """As a rank tells it, and how long its file is."""
    pieces, at = {}, 4096
    for kind in KINDS:
        for name, start, numel in _held(layout, rank):
            pieces[kind.format(name)] = [[at, start, numel, f"{at:016x}"]]
            at += 4 * numel
    return pieces, at


def files_of(ranks: int, blocks: int, folder: Path) -> Files:
    """Of a model of so many blocks; files have their size and no content."""
    layout = _layout(blocks, ranks)
    facts = {
        kind.format(fact.names[0]): TensorInfo(tuple(fact.shape), fact.dtype) for fact in layout.facts for kind in KINDS
    }
    parts, files = [], []
    for rank in range(ranks):
        pieces, nbytes = _part(layout, rank)
        parts.append(pieces)
        files.append(FileInfo(f"pieces-{rank}.safetensors", nbytes, 4096, "0" * 16))
        (folder / files[-1].name).touch()
        os.truncate(folder / files[-1].name, nbytes)
    shapes = {name: ["float32", list(facts[name].shape)] for name in parts[ranks // 2]}
    own = {"file": list(files[0]), "pieces": parts[ranks // 2], "shapes": shapes, "cuts": {}}
    start = time.perf_counter()
    found = [
        {name: [PieceInfo(number, *piece) for piece in each] for name, each in part.items()}
        for number, part in enumerate(parts)
    ]
    merged = merge_pieces(found)
    content = encode_manifest(Manifest(Head("step-1", 1, 1), tuple(files), facts, merged, {"step": 1}))
    assemble_s = time.perf_counter() - start
    count = sum(map(len, merged.values()))
    del found, merged, parts
    (folder / MANIFEST).write_bytes(content)
    start = time.perf_counter()
    source = NativeSource(folder)
    read_s = time.perf_counter() - start
    other = _layout(blocks, max(ranks * 3 // 4, 1))
    start = time.perf_counter()
    wanted = 0
    for name, first, numel in _held(other, ranks * 3 // 8):
        for kind in KINDS:
            of_kind = source.manifest.pieces[kind.format(name)]
            index = bisect_right(of_kind, first, key=lambda piece: piece.start) - 1
            wanted += bisect_right(of_kind, first + numel - 1, key=lambda piece: piece.start) - index
    find_s = time.perf_counter() - start
    source.close()
    return Files(ranks, count, len(json.dumps(own)), len(content), assemble_s, read_s, wanted, find_s)
