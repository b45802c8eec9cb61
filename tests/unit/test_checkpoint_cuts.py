"""Checkpoints whose tensors lie part after part: read whole, at the cost of what is asked for, and never believed
before they are checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.checkpoint.atomic import DISK
from shardwise.core.checkpoint.format import (
    MANIFEST,
    PIECE_BYTES,
    Head,
    Manifest,
    PieceLayout,
    as_bytes,
    decode_manifest,
    encode_manifest,
    hexadecimal,
    merge_pieces,
    read_head,
    write_pieces,
)
from shardwise.core.checkpoint.formats import native, open_checkpoint
from shardwise.core.checkpoint.formats.native import NativeSource, verify, write_native
from shardwise.core.checkpoint.source import CheckpointDamage, TensorInfo
from shardwise.core.engine.fragments import Fragment, split
from shardwise.core.parallel.tensor import Part, ShardSpec
from shardwise.core.parallel.tensor.order import StoredCut, own_runs

RANKS = 6


def written(directory: Path, whole: torch.Tensor, cut: ShardSpec) -> None:
    """As ranks of an axis save it, each a file of its own."""
    directory.mkdir()
    stored, files, pieces = StoredCut.of(whole.shape, cut), [], []
    for rank in range(cut.ranks):
        part = Part(whole.shape, cut, rank)
        local = part.of(whole).reshape(-1)
        values, parts = [], []
        for run in own_runs(part, 0, local.numel()):
            fragment = Fragment("model/w", tuple(whole.shape), whole.dtype, run.stored, run.numel, stored)
            for piece in split(fragment, PIECE_BYTES):
                at = run.local + piece.start - run.stored
                values.append(local[at : at + piece.numel])
                parts.append(piece)
        path = os.fspath(directory / f"pieces-{rank}.safetensors")
        file, own = write_pieces(DISK, path, PieceLayout(parts), map(as_bytes, values))
        files.append(file)
        pieces.append({name: [piece._replace(file=rank) for piece in each] for name, each in own.items()})
    facts = {"model/w": TensorInfo(tuple(whole.shape), whole.dtype)}
    cuts = {"model/w": stored} if stored is not None else {}
    manifest = Manifest(Head("one", 1, 0), tuple(files), facts, merge_pieces(pieces), {"step": 0}, cuts)
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))


def changed(directory: Path, change: Any, version: int = 2) -> None:
    """Another cut, with the right checksum."""
    file = directory / MANIFEST
    data = json.loads(file.read_bytes())
    head = {key: data[key] for key in ("format", "tag", "serial", "step")} | {"version": version}
    body = {key: data[key] for key in ("files", "tensors", "state")}
    body["tensors"]["model/w"]["cut"] = change
    content = (json.dumps(head)[:-1] + ",\n" + json.dumps(body)[1:-1] + ",\n").encode()
    file.write_bytes(content + f'"checksum": "{hexadecimal(content)}"}}\n'.encode())


def test_a_whole_tensor_is_read_in_blocks_at_little_more_than_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six parts of several pieces each: every block has something of each part, and one piece of each is kept."""
    monkeypatch.setattr(native, "CACHED_PIECES", 0)
    whole = torch.randn(1024, 6 * 1100)
    written(tmp_path / "one", whole, ShardSpec.even(1, whole.shape[1], RANKS))
    with NativeSource(tmp_path / "one") as source:
        assert min(len(source.manifest.pieces["model/w"]), 99) >= 2 * RANKS
        flat, step = whole.view(-1), 70_001
        for start in range(0, whole.numel(), step):
            numel = min(step, whole.numel() - start)
            assert torch.equal(source.read("model/w", start, numel), flat[start : start + numel])
        assert source.bytes_read <= sum(file.nbytes for file in source.manifest.files), "something is read twice"
    # A rank with the same part reads that; one with another part those parts that it is of.
    for ranks, rank in ((RANKS, 3), (2, 1)):
        part = Part(whole.shape, ShardSpec.even(1, whole.shape[1], ranks), rank)
        with NativeSource(tmp_path / "one") as source:
            out = torch.full((part.shape.numel(),), float("nan"))
            source.read_part("model/w", part, 0, out)
            assert torch.equal(out.view(part.shape), part.of(whole))
            assert source.bytes_read < 1.1 * out.nbytes


def test_every_reader_has_the_whole_tensor(tmp_path: Path) -> None:
    whole = torch.randn(6, 10, 3)
    written(tmp_path / "one", whole, ShardSpec.even(1, 10, 3))
    assert read_head(str(tmp_path / "one")).tag == "one" and verify(tmp_path / "one") == []
    assert json.loads((tmp_path / "one" / MANIFEST).read_bytes())["version"] == 2
    with open_checkpoint(tmp_path / "one") as source:
        assert torch.equal(source.read("model/w", 0, 180).view(6, 10, 3), whole)
        write_native(source, tmp_path / "copy")
    with NativeSource(tmp_path / "copy") as source:
        assert torch.equal(source.read("model/w", 7, 99), whole.view(-1)[7:106]) and not source.manifest.cuts
    assert json.loads((tmp_path / "copy" / MANIFEST).read_bytes())["version"] == 1
    again = decode_manifest((tmp_path / "one" / MANIFEST).read_bytes(), "it")
    assert again.cuts == {"model/w": StoredCut.of((6, 10, 3), ShardSpec.even(1, 10, 3))}


@pytest.mark.parametrize(
    "cut",
    [
        [3, [[[0, 10]]]], [1, [[[0, 4]], [[5, 10]]]], [1, [[[0, 6]], [[5, 10]]]], [1, [[[0, 10]], [[10, 10]]]],
        [1, [[[0, 10**30]]]], [True, [[[0, 10]]]], [1, [[0, 10]]], [1, [[["0", "10"]]]], [1], {"dim": 1}, None,
        [1, [[[0, 10]], *([[]] * (1 << 15))]], [1, []],
    ],
)  # fmt: skip
def test_a_cut_that_is_none_is_damage_with_the_file_named(tmp_path: Path, cut: Any) -> None:
    written(tmp_path / "one", torch.randn(6, 10, 3), ShardSpec.even(1, 10, 3))
    changed(tmp_path / "one", cut)
    with pytest.raises(CheckpointDamage, match=r"one/manifest\.json"):
        NativeSource(tmp_path / "one")
