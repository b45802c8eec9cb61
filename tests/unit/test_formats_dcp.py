"""torch DCP directories on one process: hostile and broken indices, boxes in several dimensions, odd tensors."""

from __future__ import annotations

import pickle
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_setup import differing, odd_source, optimizer_facts, same_bits, tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardwise.core.checkpoint.formats import RefusedPickle, open_checkpoint, open_dcp, write_dcp
from shardwise.core.checkpoint.formats.dcp import Chunk, DcpItem, _Chunks, read_dcp_index
from shardwise.core.checkpoint.source import CheckpointDamage


class Hostile:
    """Unpickling it runs a command."""

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return subprocess.check_call, (self.command,)


def _saved(folder: Path) -> Path:
    dcp.save({"model": {"weight": torch.arange(6.0).view(2, 3)}}, checkpoint_id=folder, no_dist=True)
    return folder


def _index(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # type: ignore[no-any-return]


def test_a_hostile_index_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    folder, touched = _saved(tmp_path / "a"), tmp_path / "touched"
    metadata = replace(_index(folder), storage_meta=Hostile(["touch", str(touched)]))  # type: ignore[arg-type]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RefusedPickle, match=r"subprocess\.check_call"):
        open_checkpoint(folder)
    assert not touched.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert touched.exists(), "the file would have run its command where pickle.load reads it"


@pytest.mark.parametrize(
    "payload", [b"cos\nsystem\n(S'true'\ntR.", b"ctorch\nload\n.", b"\x80\x04\x8c\x05posix\x8c\x06system\x93."]
)
def test_every_other_name_is_refused(payload: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(payload)
    with pytest.raises(RefusedPickle, match="was refused"):
        read_dcp_index(tmp_path)


def test_broken_directories_are_named(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "a")
    whole = (folder / ".metadata").read_bytes()
    for cut in range(0, len(whole), 7):
        (folder / ".metadata").write_bytes(whole[:cut])
        with pytest.raises(CheckpointDamage, match="metadata"):
            open_dcp(folder)
    (folder / ".metadata").write_bytes(whole)
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(CheckpointDamage, match=r"__0_0.distcp ends inside"):
        tensor(open_dcp(folder), "model/weight")
    data.unlink()
    with pytest.raises(CheckpointDamage, match="is missing"):
        open_dcp(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match=r"no .metadata"):
        open_dcp(folder)


def test_pieces_that_overlap_or_are_missing_are_damage(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "a")
    metadata = _index(folder)
    (key, place), *_ = metadata.storage_data.items()
    described = metadata.state_dict_metadata["model.weight"]
    described.chunks[0].sizes = torch.Size((1, 3))  # type: ignore[union-attr]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamage, match="3 of 6 elements"):
        open_dcp(folder)
    second = replace(described.chunks[0], offsets=torch.Size((0, 0)))  # type: ignore[union-attr]
    described.chunks.append(second)  # type: ignore[union-attr]
    metadata.storage_data[MetadataIndex(key.fqn, (1, 0))] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamage):
        open_dcp(folder)
    place.relative_path = "../__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamage, match="outside"):
        open_dcp(folder)


def test_boxes_in_several_dimensions(tmp_path: Path) -> None:
    values = torch.arange(4 * 6 * 3.0).view(4, 6, 3)
    boxes = [((0, 0, 0), (3, 2, 3)), ((0, 2, 0), (1, 4, 3)), ((1, 2, 0), (2, 4, 2)), ((1, 2, 2), (2, 4, 1))]
    boxes.append(((3, 0, 0), (1, 6, 3)))
    chunks = []
    with (tmp_path / "data").open("wb") as file:
        for offsets, sizes in boxes:
            start = file.tell()
            torch.save(values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone(), file)
            chunks.append(Chunk(offsets, sizes, "data", start, file.tell() - start))
    item = DcpItem(("w",), (4, 6, 3), torch.float32, tuple(chunks))
    reader = _Chunks(tmp_path)
    for start in range(0, 73):
        for numel in range(0, 73 - start, 5):
            assert torch.equal(reader.read("w", item, start, numel), values.reshape(-1)[start : start + numel])


@pytest.mark.parametrize("layout", ["fsdp2", "torchtitan"])
def test_odd_tensors_return(layout: str, tmp_path: Path) -> None:
    source = odd_source()
    write_dcp(source, tmp_path / "out", layout)
    again = open_checkpoint(tmp_path / "out")
    # DCP has no word for "the same tensor": the tied name comes back as a tensor of its own.
    assert differing(source, again) == ["model/head.weight"]
    assert same_bits(tensor(again, "model/head.weight"), tensor(source, "model/embed.weight"))
    assert optimizer_facts(again) == optimizer_facts(source)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    source = odd_source()
    write_dcp(source, tmp_path / "out")
    wanted = {
        "model": {name.removeprefix("model/"): torch.empty(f.shape, dtype=f.dtype)
                  for name, f in source.tensors().items() if name.startswith("model/")}
    }  # fmt: skip
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(same_bits(value, tensor(source, f"model/{name}")) for name, value in wanted["model"].items())
