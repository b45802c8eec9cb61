"""Tests of reading and writing DCP directories and single files (safetensors and torch files).

Hostile and damaged files are refused; chunks may be boxes in several dimensions; unusual tensors keep their bits.
"""

import pickle
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardwise.core.checkpoint import formats
from shardwise.core.checkpoint.formats import RefusedPickle, open_checkpoint, open_dcp, open_single
from shardwise.core.checkpoint.formats.dcp import Chunk, DcpItem, _Chunks
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from tests.support.formats_setup import differing, odd_model, odd_source, same_bits, tensor
from tests.support.on_ranks import raises


@dataclass
class Hostile:
    """An object whose unpickling runs a command."""

    command: list[str]

    def __reduce__(self) -> Any:
        return subprocess.check_call, (self.command,)


def _saved(folder: Path) -> Path:
    dcp.save({"model": {"weight": torch.arange(6.0).view(2, 3)}}, checkpoint_id=folder, no_dist=True)
    return folder


def _index(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # type: ignore[no-any-return]


def _broken(folder: Path, index: Metadata, words: str | None) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    raises(CheckpointDamage, words, open_dcp, folder)


def test_hostile_index_is_refused(tmp_path: Path) -> None:
    folder, touched = _saved(tmp_path / "a"), tmp_path / "touched"
    metadata = replace(_index(folder), storage_meta=Hostile(["touch", str(touched)]))  # type: ignore[arg-type]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    raises(RefusedPickle, r"subprocess\.check_call", lambda: open_checkpoint(folder))
    assert not touched.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert touched.exists(), "the file would have run its command where pickle.load reads it"


def test_damaged_directories(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "a")
    whole = (folder / ".metadata").read_bytes()
    for cut in range(0, len(whole), 7):
        (folder / ".metadata").write_bytes(whole[:cut])
        raises(CheckpointDamage, "metadata", lambda: open_dcp(folder))
    (folder / ".metadata").write_bytes(whole)
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    raises(CheckpointDamage, r"__0_0.distcp ends inside", lambda: tensor(open_dcp(folder), "model/weight"))
    data.unlink()
    raises(CheckpointDamage, "is missing", lambda: open_dcp(folder))
    (folder / ".metadata").unlink()
    raises(FileNotFoundError, r"no .metadata", lambda: open_dcp(folder))


def test_overlapping_and_missing_chunks(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "a")
    metadata = _index(folder)
    (key, place), *_ = metadata.storage_data.items()
    chunks = metadata.state_dict_metadata["model.weight"].chunks  # type: ignore[union-attr]
    chunks[0].sizes = torch.Size((1, 3))
    _broken(folder, metadata, "3 of 6 elements")
    chunks.append(replace(chunks[0], offsets=torch.Size((0, 0))))
    metadata.storage_data[MetadataIndex(key.fqn, (1, 0))] = place
    _broken(folder, metadata, None)
    place.relative_path = "../__0_0.distcp"
    _broken(folder, metadata, "outside")


def test_chunks_in_several_dimensions(tmp_path: Path) -> None:
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


def test_torch_loads_written_directories(tmp_path: Path) -> None:
    source = odd_source()
    formats.write_dcp(source, tmp_path / "out")
    model = odd_model_of(source)
    wanted = {"model": {name: torch.empty_like(value) for name, value in model.items()}}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(same_bits(value, model[name]) for name, value in wanted["model"].items())


def _net() -> nn.Module:
    """Return a model whose buffers have shapes of parameters, so that shapes alone do not identify an entry."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _trained(model: nn.Module, named: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters(), lr=0.1)
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def test_written_files_are_plain_safetensors(tmp_path: Path) -> None:
    source = odd_source()
    formats.write_single(source, tmp_path / "model.safetensors")
    loaded, model = load_file(tmp_path / "model.safetensors"), odd_model_of(source)
    assert loaded.keys() == model.keys() and all(same_bits(loaded[name], value) for name, value in model.items())
    again = open_checkpoint(tmp_path / "model.safetensors")
    assert differing(source, again, "model/") == [] and again.state()["aliases"] == {"head.weight": "embed.weight"}


def odd_model_of(source: Any) -> dict[str, torch.Tensor]:
    names = [name for name in source.tensors() if name.startswith("model/")]
    return {name.removeprefix("model/"): tensor(source, name) for name in names}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_torch_files(suffix: str, legacy: bool, tmp_path: Path) -> None:
    model = odd_model()
    model["tied"] = model["embed.weight"]
    model["view"] = model["embed.weight"][1:]
    torch.save(model, tmp_path / f"m{suffix}", _use_new_zipfile_serialization=not legacy)
    source = open_checkpoint(tmp_path / f"m{suffix}")
    assert source.state() == {"aliases": {"tied": "embed.weight"}}
    assert set(source.tensors()) == {f"model/{name}" for name in model if name != "tied"}
    for name in source.tensors():
        value = model[name.removeprefix("model/")]
        assert same_bits(tensor(source, name), value), name
        count = value.numel()
        assert same_bits(source.read(name, count // 2, count - count // 2), value.reshape(-1)[count // 2 :])


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "module"])
def test_training_checkpoints(key: str, tmp_path: Path) -> None:
    model = _net()
    optimizer = _trained(model, named=True)
    saved_state = optimizer.state_dict()
    other = {"optimizer_states": [saved_state]} if key == "state_dict" else {"optimizer": saved_state}
    torch.save({key: model.state_dict(), **other, "epoch": 3, "lr_schedulers": []}, tmp_path / "last.ckpt")
    source = open_checkpoint(tmp_path / "last.ckpt")
    expected = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        expected |= {f"optimizer/0/{name}/{k}": v for k, v in optimizer.state[parameter].items() if v.ndim}
    assert set(source.tensors()) == set(expected)
    assert all(same_bits(tensor(source, name), value) for name, value in expected.items())
    (saved,) = source.state()["optimizers"]
    assert saved["groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert saved["small"]["2.bias"] == {"step": {"dtype": "float32", "value": 1.0}}
    assert any("'epoch'" in note for note in source.notes)  # type: ignore[attr-defined]


def test_numbered_state_gets_names_if_they_are_unambiguous(tmp_path: Path) -> None:
    plain, model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)), _net()
    names = [name for name, _ in model.named_parameters()]
    file = tmp_path / "a.pt"
    for each, given in ((plain, None), (model, names)):
        optimizer = _trained(each)
        torch.save({"model": each.state_dict(), "optimizer": optimizer.state_dict()}, file)
        source = open_single(file, given)
        assert not source.notes
        for name, parameter in each.named_parameters():
            assert same_bits(tensor(source, f"optimizer/0/{name}/exp_avg"), optimizer.state[parameter]["exp_avg"])
    source = open_single(file)
    assert "optimizer/0/#0/exp_avg" in source.tensors() and "parameter_names=" in source.notes[0]
    raises(CheckpointError, "6 parameters; 5 names", lambda: open_single(file, names[:5]))


class Thing:
    """A class that needs a full unpickle."""


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    for legacy in (False, True):
        torch.save({"w": torch.ones(1), "x": Thing()}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
        raises(RefusedPickle, r"Thing.*run any code|refused.*run any code", lambda: open_checkpoint(tmp_path / "a.pt"))
    torch.save(nn.Linear(2, 2), tmp_path / "b.pt")
    raises(RefusedPickle, r"torch.nn.modules.linear.Linear", lambda: open_checkpoint(tmp_path / "b.pt"))


def test_damaged_files_and_unknown_content(tmp_path: Path) -> None:
    torch.save(odd_model(), tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    for cut in (0, 10, len(content) // 2, len(content) - 1):
        (tmp_path / "b.pt").write_bytes(content[:cut])
        raises((CheckpointDamage, RefusedPickle), None, lambda: open_single(tmp_path / "b.pt"))
    for value in ([torch.ones(1)], {"a": 1}, {3: torch.ones(1)}):
        torch.save(value, tmp_path / "c.pt")
        raises(CheckpointError, r"c\.pt", lambda: open_single(tmp_path / "c.pt"))
    torch.save({"s": torch.eye(2).to_sparse()}, tmp_path / "d.pt")
    raises(CheckpointError, "sparse", lambda: open_single(tmp_path / "d.pt"))
    raises(CheckpointError, r"'\.npz'", lambda: open_single(tmp_path / "model.npz"))
    raises(ValueError, r"model\.safetensors", lambda: formats.write_single(odd_source(), tmp_path / "model.npz"))
