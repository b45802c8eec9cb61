"""Models in stages that were made in other ways: with adapters (LoRA), and without memory (deferred)."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.core.deferred import deferred_init
from shardwise.core.parallel.pipeline import split_batch
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import Texts, made, optimizer_of
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

ROWS, STEPS, PARTS = 4, 2, 4
ZBV: dict[str, Any] = {"pp_style": "zbv", "num_model_chunks": 2}
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj", "o_proj"], modules_to_save=["lm_head"])


def batch_of(step: int, replica: int) -> dict[str, Tensor]:
    first = ROWS * (step * 2 + replica)
    return {name: values[first : first + ROWS] for name, values in Texts(ROWS * STEPS * 2).items.items()}


def steps_of(model: Any, optimizer: Any, replicas: int) -> None:
    for step in range(STEPS):
        for replica in range(replicas):
            for part in split_batch(batch_of(step, replica), PARTS, None):
                (model(**part.kwargs).loss * part.share / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()


def pipelined(booster: Booster, model: Any, optimizer: Any) -> None:
    assert booster.plugin is not None
    replica, _ = booster.plugin.data_parallel()
    for step in range(STEPS):
        booster.execute_pipeline(iter([batch_of(step, replica)]), model, lambda out, _: out.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def plugin_of(**given: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", num_microbatches=PARTS, **given)


def adapted(model: nn.Module) -> PeftModel:
    torch.manual_seed(4)
    found = get_peft_model(model, LORA)
    for name, param in found.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(param, std=0.3)
    return found  # type: ignore[return-value]


def whole() -> Any:
    return made("llama", num_hidden_layers=4)


@functools.cache
def plain_adapted() -> dict[str, Tensor]:
    """What one process makes of the batches of two replicas."""
    plain = adapted(whole())
    steps_of(plain, optimizer_of(plain), 2)
    return {name: param.detach() for name, param in plain.named_parameters()}


def _with_adapters(given: dict[str, Any], folder: str, expected: dict[str, Tensor]) -> None:
    first = adapted(whole())
    if dist.get_rank() == 0:
        first.save_pretrained(f"{folder}/first")
    dist.barrier()
    booster = Booster(plugin=plugin_of(**given))
    peft = booster.enable_lora(whole(), pretrained_dir=f"{folder}/first")
    model, optimizer, *_ = booster.boost(peft, optimizer_of(peft))
    pipelined(booster, model, optimizer)
    state = model.state_dict()
    assert_close({name: state[name] for name in expected}, expected, 1e-6, "with adapters")
    assert {name for name, p in peft.named_parameters() if p.requires_grad} < {n for n in expected if "lora_" in n} | {
        n for n in expected if "modules_to_save" in n
    }
    booster.save_lora_as_pretrained(model, f"{folder}/after", use_safetensors=True)
    again = PeftModel.from_pretrained(whole(), f"{folder}/after")
    for name, param in again.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.testing.assert_close(param.detach(), expected[name], rtol=1e-5, atol=1e-6, check_dtype=False)
    booster.close()


@pytest.mark.parametrize("given", [{"zero_stage": 1}, *full({**ZBV, "zero_stage": 2})], ids=str)
def test_adapters_are_trained_and_saved(given: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(4, _with_adapters, given, str(tmp_path), plain_adapted(), timeout=240)  # the first one imports peft


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=22,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@on_ranks(2)
@pytest.mark.parametrize("given", [{"zero_stage": 1}, *full(ZBV)], ids=str)
def test_a_model_without_memory_is_made_in_stages(given: dict[str, Any]) -> None:
    torch.manual_seed(7)
    plain = llama()
    torch.manual_seed(7)
    with deferred_init():
        lazy = llama()
    booster = Booster(plugin=plugin_of(**given))
    model, optimizer, *_ = booster.boost(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
    state = model.state_dict()
    assert_close({name: state[name] for name in expected}, expected, 0.0, "values as they begin")
    steps_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1), dist.get_world_size() // 2)
    pipelined(booster, model, optimizer)
    state = model.state_dict()
    after = {name: param.detach() for name, param in plain.named_parameters()}
    assert_close({name: state[name] for name in after}, after, 1e-5, "values after two steps")
    assert not any(torch.equal(after[name], expected[name]) for name in after)
    booster.close()
