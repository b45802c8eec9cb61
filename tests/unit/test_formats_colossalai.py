"""ColossalAI's layout: what its own loading steps need, both directions, prefixes, names for numbered state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_setup import TRAINED, differing, odd_source, optimizer_facts, same_bits, tensor
from safetensors.torch import load_file
from torch import nn

from shardwise.core.checkpoint.formats import (
    open_checkpoint,
    open_colossalai,
    write_colossalai_model,
    write_colossalai_optimizer,
)
from shardwise.core.checkpoint.formats.lazy import LazySource
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError


def _both(source: Any, folder: Path, size: float = 1e-4, **options: Any) -> Path:
    write_colossalai_model(source, folder / "model", size, **options)
    write_colossalai_optimizer(source, folder / "optimizer", size, options.get("prefix"))
    return folder


@pytest.mark.parametrize("use_safetensors", [False, True])
@pytest.mark.parametrize("prefix", [None, "first"])
@pytest.mark.parametrize("size", [1e-4, 1024])
def test_files_have_the_published_names_and_return(
    use_safetensors: bool, prefix: str | None, size: float, tmp_path: Path
) -> None:
    source = odd_source()
    _both(source, tmp_path, size, use_safetensors=use_safetensors, prefix=prefix)
    own = f".{prefix}" if prefix else ""
    stem, ending = ("model", "safetensors") if use_safetensors else ("pytorch_model", "bin")
    model = {path.name for path in (tmp_path / "model").iterdir()}
    index_name = f"{stem}.{ending}.index{own}.json"
    shards = sorted(model - {index_name})
    assert shards == [f"{stem}{own}-{n:05d}.{ending}" for n in range(1, len(shards) + 1)]
    assert (len(shards) > 3) == (size < 1)
    index = json.loads((tmp_path / "model" / index_name).read_text())
    assert set(index["weight_map"].values()) == set(shards) and "head.weight" in index["weight_map"]
    optimizer = {path.name for path in (tmp_path / "optimizer").iterdir()}
    assert {f"pytorch_optim.bin.index{own}.json", f"pytorch_optim_group{own}.bin"} <= optimizer
    assert f"pytorch_optim{own}-00001.bin" in optimizer
    names = list(TRAINED)
    again = open_checkpoint(tmp_path, parameter_names=names)
    tied = {"model/head.weight"} & set(again.tensors())
    assert differing(source, again) == sorted(tied)
    assert tied or again.state()["aliases"] == {"head.weight": "embed.weight"}
    assert optimizer_facts(again) == optimizer_facts(source)


def test_colossalai_style_loading(tmp_path: Path) -> None:
    """The steps of its GeneralCheckpointIO: exactly one index, torch.load of each shard, numbers through the groups."""
    source = odd_source()
    _both(source, tmp_path)
    for folder in ("model", "optimizer"):
        assert len(list((tmp_path / folder).glob("*.index.*json"))) == 1
    index = json.loads((tmp_path / "optimizer" / "pytorch_optim.bin.index.json").read_text())
    groups = torch.load(tmp_path / "optimizer" / index["metadata"]["param_groups"], weights_only=True)
    assert [group["params"] for group in groups] == [[0, 1, 2], [3, 4]]
    assert groups[0]["betas"] == (0.9, 0.999) and groups[1]["lr"] == 1e-300
    state: dict[int, Any] = {}
    for file in set(index["weight_map"].values()):
        state |= torch.load(tmp_path / "optimizer" / file, weights_only=True)
    assert sorted(state) == [0, 1, 2, 3, 4] and sorted(map(int, index["weight_map"])) == sorted(state)
    for number, name in enumerate(TRAINED):
        assert same_bits(state[number]["exp_avg"], tensor(source, f"optimizer/0/{name}/exp_avg"))
        assert same_bits(state[number]["step"], torch.tensor(float(number)))
    index = json.loads((tmp_path / "model" / "pytorch_model.bin.index.json").read_text())
    loaded: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        loaded |= torch.load(tmp_path / "model" / file, weights_only=True)
    assert set(loaded) == set(index["weight_map"]) and same_bits(loaded["head.weight"], loaded["embed.weight"])
    megabytes = sum(value.numel() * value.element_size() for value in loaded.values()) / 1024**2
    assert index["metadata"]["total_size"] == pytest.approx(megabytes)


def _upstream(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """What save_model and save_optimizer of v0.4.4 write, in two shards each."""
    for part in ("modeling", "optimizer"):
        (folder / part).mkdir(parents=True)
    weights, weight_map = list(model.state_dict().items()), {}
    for number, items in enumerate((weights[:2], weights[2:]), 1):
        file = f"pytorch_model-{number:05d}.bin"
        torch.save(dict(items), folder / "modeling" / file)
        weight_map.update({name: file for name, _ in items})
    index = {"metadata": {"total_size": 0.1}, "weight_map": weight_map}
    (folder / "modeling" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    saved = optimizer.state_dict()
    states, weight_map = list(saved["state"].items()), {}
    for number, items in enumerate((states[:1], states[1:]), 1):
        file = f"pytorch_optim-{number:05d}.bin"
        torch.save(dict(items), folder / "optimizer" / file)
        weight_map.update({number: file for number, _ in items})
    torch.save(saved["param_groups"], folder / "optimizer" / "pytorch_optim_group.bin")
    metadata = {"param_groups": "pytorch_optim_group.bin", "total_size": 0.1}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    (folder / "optimizer" / "pytorch_optim.bin.index.json").write_text(text)


def test_upstream_directories_are_read_with_names_from_shapes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    _upstream(model, optimizer, tmp_path / "run")
    for source in (
        open_checkpoint(tmp_path / "run"),
        open_checkpoint(tmp_path / "run" / "modeling", optimizer=tmp_path / "run" / "optimizer"),
    ):
        assert source.format == "colossalai" and not source.notes  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters():
            assert same_bits(tensor(source, f"model/{name}"), parameter.detach())
            assert same_bits(tensor(source, f"optimizer/0/{name}/exp_avg_sq"), optimizer.state[parameter]["exp_avg_sq"])
    alone = open_colossalai(tmp_path / "run" / "optimizer")
    assert "optimizer/0/#3/exp_avg" in alone.tensors()


def test_stale_shards_go_and_a_file_is_refused(tmp_path: Path) -> None:
    source = odd_source()
    _both(source, tmp_path)
    many = len(list(tmp_path.rglob("*")))
    _both(source, tmp_path, 1024)
    assert len(list(tmp_path.rglob("*"))) < many
    names = {path.name for path in (tmp_path / "optimizer").iterdir()}
    assert names == {"pytorch_optim-00001.bin", "pytorch_optim.bin.index.json", "pytorch_optim_group.bin"}
    write_colossalai_model(source, tmp_path / "model", use_safetensors=True)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"model-00001.safetensors", "model.safetensors.index.json"}
    assert "head.weight" in load_file(tmp_path / "model" / "model-00001.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        write_colossalai_model(source, tmp_path / "file")


def test_damage_is_named(tmp_path: Path) -> None:
    _both(odd_source(), tmp_path)
    group = tmp_path / "optimizer" / "pytorch_optim_group.bin"
    content = group.read_bytes()
    group.unlink()
    with pytest.raises(FileNotFoundError, match="pytorch_optim_group"):
        open_checkpoint(tmp_path)
    group.write_bytes(content)
    (tmp_path / "optimizer" / "pytorch_optim-00002.bin").unlink()
    with pytest.raises(CheckpointDamage, match=r"pytorch_optim-00002.bin is missing"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no optimizer 1"):
        write_colossalai_optimizer(odd_source(), tmp_path / "x", index=1)
    with pytest.raises(CheckpointError, match="no model"):
        write_colossalai_model(LazySource("memory", {}), tmp_path / "x")
