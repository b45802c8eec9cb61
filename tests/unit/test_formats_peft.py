"""PEFT adapters: names as peft 0.21 writes them, and peft itself where it is installed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_setup import differing, same_bits, tensor

from shardwise.core.checkpoint.formats import open_checkpoint, write_peft
from shardwise.core.checkpoint.formats.lazy import LazySource, entry_of_tensor
from shardwise.core.checkpoint.formats.peft import name_in_file, name_in_model
from shardwise.core.checkpoint.source import CheckpointError
from tests.support.sets import full

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "bias": "none", "modules_to_save": ["norm", "classifier"]}
START = "base_model.model.model"
# (in the file, in the model)
NAMES = [
    (f"{START}.q_proj.lora_A.weight", f"{START}.q_proj.lora_A.default.weight"),
    (f"{START}.q_proj.lora_B.bias", f"{START}.q_proj.lora_B.default.bias"),
    (f"{START}.embed.lora_embedding_A", f"{START}.embed.lora_embedding_A.default"),
    (f"{START}.q_proj.lora_magnitude_vector", f"{START}.q_proj.lora_magnitude_vector.default.weight"),
    (f"{START}.layernorm.weight", f"{START}.layernorm.modules_to_save.default.weight"),
    (f"{START}.e.token_adapter.trainable_tokens_delta", f"{START}.e.token_adapter.trainable_tokens_delta.default"),
    (f"{START}.classifier.dense.bias", f"{START}.classifier.modules_to_save.default.dense.bias"),
]
NOT_PART = [
    f"{START}.q_proj.base_layer.weight",
    f"{START}.layernorm.original_module.weight",
    f"{START}.q_proj.lora_A.other.weight",
    f"{START}.layernorm.modules_to_save.other.weight",
    f"{START}.q_proj.base_layer.bias",
]


@pytest.mark.parametrize(("in_file", "in_model"), NAMES)
def test_names(in_file: str, in_model: str) -> None:
    assert name_in_model(in_file, CONFIG) == in_model
    assert name_in_file(in_model, CONFIG) == in_file
    assert name_in_file(in_model, CONFIG, "other") is None
    assert name_in_model(in_file, CONFIG, "other") == in_model.replace("default", "other")


def _source() -> tuple[LazySource, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = {name: torch.randn(2, 3) for name in (*(inside for _, inside in NAMES), *NOT_PART)}
    return LazySource("m", {f"model/{name}": entry_of_tensor(value) for name, value in model.items()}), model


def test_errors_say_what_is_missing(tmp_path: Path) -> None:
    source, _ = _source()
    with pytest.raises(CheckpointError, match="needs its configuration"):
        write_peft(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="'PREFIX_TUNING'"):
        write_peft(source, tmp_path / "out", {"peft_type": "PREFIX_TUNING"})
    with pytest.raises(CheckpointError, match=r"q_proj\.strange\.default: trained parameters of the adapter 'default'"):
        write_peft(source, tmp_path / "out", CONFIG, trained=[f"{START}.q_proj.strange.default", NAMES[0][1]])
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="no parameters of an adapter 'mine'"):
        write_peft(source, tmp_path / "out", CONFIG, adapter="mine")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="neither adapter_model"):
        open_checkpoint(tmp_path)


LORA: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "bias": {"target_modules": ["q_proj"], "bias": "all"},
    "own bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "head": {"target_modules": r".*(q_proj|lm_head)"},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 3]}},
    "resized": {"target_modules": ["q_proj"]},
    "resized tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 33]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("use_safetensors", [True, *full(False)])
@pytest.mark.parametrize("kind", LORA)
def test_peft_itself(kind: str, use_safetensors: bool, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    seeds = itertools.count()

    def base() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, attention_bias=True, **sizes))
        if "resized" in kind:
            made.config.save_pretrained(tmp_path / "base")
            made.name_or_path = str(tmp_path / "base")
            torch.manual_seed(next(seeds))  # the new rows are others each time
            made.resize_token_embeddings(35, mean_resizing=False)
        return made

    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **LORA[kind]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    state = model.state_dict()
    model.save_pretrained(tmp_path / "theirs", safe_serialization=use_safetensors)
    theirs = open_checkpoint(tmp_path / "theirs")
    trained = {f"model/{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained <= set(theirs.tensors())
    assert all(same_bits(tensor(theirs, name), state[name.removeprefix("model/")]) for name in theirs.tensors())
    source = LazySource("m", {f"model/{name}": entry_of_tensor(value) for name, value in state.items()})
    write_peft(source, tmp_path / "ours", model.peft_config["default"], use_safetensors=use_safetensors)
    assert differing(theirs, open_checkpoint(tmp_path / "ours")) == []
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").state_dict()
    assert set(loaded) == set(state) and all(same_bits(loaded[name], state[name]) for name in state)
