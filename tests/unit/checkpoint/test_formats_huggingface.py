"""Tests of Hugging Face directories against transformers: reading, writing, tied weights, shards and damage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shardwise.core.checkpoint.formats import open_checkpoint, open_huggingface, write_checkpoint, write_huggingface
from shardwise.core.checkpoint.formats.lazy_tensors import LazySource, entry_of_tensor
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from tests.support.formats_setup import differing, odd_source, same_bits
from tests.support.hybrid_setup import made
from tests.support.on_ranks import raises

MODELS = {
    "llama": lambda: made("llama", torch.float32),
    "llama-tied": lambda: made("llama", torch.float32, tie_word_embeddings=True),
    "gpt2": lambda: made("gpt2", torch.float32),
}


def _source(model: Any) -> LazySource:
    """Return a source with the model's tensors; a tied tensor has its first name."""
    names: dict[int, str] = {}
    entries, aliases = {}, {}
    for name, value in model.state_dict().items():
        kept = names.setdefault(value.data_ptr(), name)
        if kept == name:
            entries[f"model/{name}"] = entry_of_tensor(value)
        else:
            aliases[name] = kept
    return LazySource("memory", entries, {"aliases": aliases})


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size_per_shard", [1024, 0.004])
def test_from_pretrained_loads_written_directories(kind: str, size_per_shard: float, tmp_path: Path) -> None:
    model = MODELS[kind]()
    source = _source(model)
    assert bool(source.state()["aliases"]) == (kind != "llama")
    configs = {"config": model.config, "generation_config": model.generation_config}
    written = write_huggingface(source, tmp_path / "out", size_per_shard, **configs)
    assert all(path.is_file() for path in written)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    if size_per_shard == 1024:
        assert files == ["model.safetensors"]
    else:
        count = len(files)
        assert count > 2 and files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected, got = model.state_dict(), loaded.state_dict()
    assert list(expected) == list(got) and all(same_bits(expected[name], got[name]) for name in expected)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == (kind != "llama")
    tokens = torch.arange(8)[None]
    assert torch.equal(model.eval()(tokens).logits, loaded.eval()(tokens).logits)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("max_shard_size", ["1GB", "5KB"])
def test_save_pretrained_directories_are_read(kind: str, max_shard_size: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    source = open_checkpoint(tmp_path)
    assert differing(_source(model), source) == []
    assert source.format == "huggingface"  # type: ignore[attr-defined]
    source.close()
    source.close()


@pytest.mark.parametrize("sharded", [False, True])
def test_bin_files_and_their_ties(sharded: bool, tmp_path: Path) -> None:
    model = MODELS["gpt2"]()
    state = dict(model.state_dict())
    if sharded:
        names = list(state)
        weight_map = {}
        for number, part in enumerate((names[:3], names[3:]), 1):
            file = f"pytorch_model-{number:05d}-of-00002.bin"
            torch.save({name: state[name] for name in part}, tmp_path / file)
            weight_map |= dict.fromkeys(part, file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    source = open_checkpoint(tmp_path)
    if not sharded:  # ties cannot be seen across files
        assert source.state()["aliases"] == {"lm_head.weight": "transformer.wte.weight"}
        assert differing(_source(model), source) == []
    else:
        assert differing(LazySource("m", {f"model/{n}": entry_of_tensor(v) for n, v in state.items()}), source) == []


def test_unusual_tensors_and_other_files_are_kept(tmp_path: Path) -> None:
    """test_output_files.py tests that a failed write keeps the old model."""
    source, out = odd_source(), tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    (out / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    for size in (1e-4, 1024):
        write_huggingface(source, out, size)
        assert differing(source, open_huggingface(out), "model/") == []
    left = {path.name for path in out.iterdir()}
    assert left == {"tokenizer.json", "config.json", "model.safetensors"}, "shards of the earlier save are gone"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:  # read by the safetensors library
        assert set(file.keys()) == {name.removeprefix("model/") for name in source.tensors() if name[:6] == "model/"}
        assert file.metadata() == {"format": "pt"}
        assert same_bits(file.get_tensor("scale"), torch.tensor(1.5))


def test_damaged_directories_name_the_file(tmp_path: Path) -> None:
    write_huggingface(odd_source(), tmp_path / "out", 1e-4)
    file = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    content = file.read_bytes()
    for size, words in ((-1, file.name), (5, "not a whole safetensors")):
        file.write_bytes(content[:size])
        raises(CheckpointDamage, words, open_huggingface, tmp_path / "out")
    file.unlink()
    raises(CheckpointDamage, "is missing", open_huggingface, tmp_path / "out")
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    raises(CheckpointError, "outside", lambda: open_huggingface(tmp_path / "out"))


@pytest.mark.parametrize("call", [open_checkpoint, lambda path: write_checkpoint(odd_source(), path, "dcp")])
def test_urls_are_refused(call: Any) -> None:
    raises(ValueError, "is a URL: give a local path", call, Path("memory://runs"))
