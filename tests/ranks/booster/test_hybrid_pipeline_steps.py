"""Pipeline steps of HybridParallelPlugin: gradients edited between passes and ``step()``, LoRA and deferred models.

The reference is plain PyTorch in one process.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from test_hybrid_pipeline import exact
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import HybridParallelPlugin
from shardwise.core.deferred import deferred_init
from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.testing import assert_close, run_ranks, train_plain
from tests.support.hybrid_setup import VOCABULARY, Texts, made, optimizer_of
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

ROWS, PARTS, RATE, REPLICAS = 4, 4, 0.5, 2
ZBV: dict[str, Any] = {"pp_style": "zbv", "num_model_chunks": 2}
Named = list[tuple[str, nn.Parameter]]


def model_of() -> Any:
    return made("llama", num_hidden_layers=4)


def batch_of(call: int, replica: int) -> dict[str, Tensor]:
    first = ROWS * (call * 2 + replica)
    return {name: values[first : first + ROWS] for name, values in Texts(ROWS * 4).items.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def plugin_of(**given: Any) -> HybridParallelPlugin:
    defaults = {"tp_size": 1, "pp_size": 2, "precision": "fp32", "num_microbatches": PARTS}
    return HybridParallelPlugin(**defaults | given)


def boosted(model: Any, **given: Any) -> tuple[Booster, HybridParallelPlugin, Any, Any]:
    plugin = plugin_of(**given)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    return booster, plugin, model, optimizer


def halve(params: Named) -> None:
    for _, param in params:
        assert param.grad is not None
        param.grad.mul_(0.5)


def limit(params: Named) -> None:
    torch.nn.utils.clip_grad_value_([param for _, param in params], 0.003)


def norms(params: Named) -> None:
    for _, param in params:
        assert param.grad is not None and bool(param.grad.norm() > 0)


def assign(params: Named) -> None:
    for _, param in params:
        param.grad = torch.full_like(param, 0.1)


def drop(params: Named) -> None:
    for name, param in params:
        if "mlp" in name:
            param.grad = None


EDITS: list[tuple[Callable[[Named], None], int]] = [
    *((halve, 1), (halve, 2), (limit, 1), (norms, 2), (assign, 1), (drop, 1), (drop, 2))
]
"""Edits, each with the number of calls before the step; the edit follows the first call."""


@functools.cache
def plain() -> list[dict[str, Tensor]]:
    """Return the parameters after the step of each edit."""
    whole, found = model_of(), []
    optimizer = sgd(whole)
    for edit, calls in EDITS:
        for call in range(calls):
            for each in range(REPLICAS):
                for part in split_batch(batch_of(call, each), PARTS, None):
                    (exact(whole(**part.kwargs), part.kwargs) * part.share / REPLICAS).backward()
            if call == 0:
                edit(list(whole.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: param.detach().clone() for name, param in whole.named_parameters()})
    return found


def evaluate(booster: Booster, plugin: HybridParallelPlugin, model: Any) -> None:
    """Evaluate with other shapes between the calls of a step."""
    longer = torch.arange(1, 6).repeat(5, 2)
    batch = {"input_ids": longer, "labels": longer}
    with torch.no_grad():
        seen = booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, return_outputs=True)
    last = plugin.session(model).pipeline.last
    assert (seen["loss"] is not None) == last
    assert not last or seen["outputs"]["logits"].shape == (5, 10, VOCABULARY)


def _edited(given: dict[str, Any], after: list[dict[str, Tensor]]) -> None:
    booster, plugin, model, optimizer = boosted(model_of(), **given)
    replica, replicas = plugin.data_parallel()
    assert replicas == REPLICAS
    for (edit, calls), values in zip(EDITS, after, strict=True):
        for call in range(calls):
            booster.execute_pipeline(iter([batch_of(call, replica)]), model, exact, optimizer)
            if call == 0:
                edit(list(model.named_parameters()))
            evaluate(booster, plugin, model)
        optimizer.step()
        optimizer.zero_grad()
        own = {name.removeprefix("module."): param.detach() for name, param in model.named_parameters()}
        assert_close(own, {name: values[name] for name in own}, 1e-9, f"{edit.__name__}, {calls} calls")
    if given["zero_stage"] < 2:
        with booster.no_sync(model, optimizer):
            booster.execute_pipeline(iter([batch_of(0, replica)]), model, exact, optimizer)
        with pytest.raises(RuntimeError, match=r"after a pass under no_sync\(\)"):
            norms(list(model.named_parameters()))
    booster.close()


@pytest.mark.parametrize("given", [{"zero_stage": 1}, *full({"zero_stage": 0}, {"zero_stage": 2, **ZBV})], ids=str)
def test_gradients_can_be_edited_before_the_step(given: dict[str, Any]) -> None:
    run_ranks(2 * REPLICAS, _edited, given, plain())


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero2_refuses_different_numbers_of_micro_batches(stage: int) -> None:
    booster, plugin, model, optimizer = boosted(model_of(), zero_stage=stage)
    replica, _ = plugin.data_parallel()
    batch = {name: values[: ROWS - 2 * replica] for name, values in batch_of(0, replica).items()}

    def step() -> None:
        booster.execute_pipeline(iter([batch]), model, exact, optimizer)
        optimizer.step()

    if stage == 1:
        step()
    else:
        words = r"different numbers of micro-batches \(rank 0 4, rank 1 2\)[\s\S]*drop_last=True"
        raises(ValueError, words, step)
    booster.close()


# -- models with LoRA adapters, and models of deferred_init

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj", "o_proj"], modules_to_save=["lm_head"])


def plain_of_replicas(make: Callable[[], nn.Module], optimizer: Any, replicas: int) -> dict[str, Tensor]:
    """Train two steps in one process on the batches of all replicas."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        parts = split_batch(batch, PARTS, None)
        return torch.stack([model(**part.kwargs).loss * part.share for part in parts]).sum()

    batches = [[[batch_of(step, replica) for replica in range(replicas)]] for step in range(2)]
    return train_plain(make, loss, optimizer, batches).masters[-1]


def pipelined(booster: Booster, model: Any, optimizer: Any) -> None:
    assert booster.plugin is not None
    replica, _ = booster.plugin.data_parallel()
    for step in range(2):
        booster.execute_pipeline(iter([batch_of(step, replica)]), model, lambda out, _: out.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def adapted(model: nn.Module) -> PeftModel:
    torch.manual_seed(4)
    found = get_peft_model(model, LORA)
    for name, param in found.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(param, std=0.3)
    return found  # type: ignore[return-value]


@on_ranks(4, timeout=240)  # the first one imports peft
@pytest.mark.parametrize("given", [{"zero_stage": 1}, *full({**ZBV, "zero_stage": 2})], ids=str)
def test_adapters_are_trained_and_saved(given: dict[str, Any], tmp_path: Path) -> None:
    expected, folder = plain_of_replicas(lambda: adapted(model_of()), optimizer_of, 2), str(tmp_path)
    first = adapted(model_of())
    if dist.get_rank() == 0:
        first.save_pretrained(f"{folder}/first")
    dist.barrier()
    booster = Booster(plugin=plugin_of(**given))
    peft = booster.enable_lora(model_of(), pretrained_dir=f"{folder}/first")
    model, optimizer, *_ = booster.boost(peft, optimizer_of(peft))
    pipelined(booster, model, optimizer)
    state = model.state_dict()
    assert_close({name: state[name] for name in expected}, expected, 1e-6, "with adapters")
    own = {name for name in expected if "lora_" in name or "modules_to_save" in name}
    assert {name for name, p in peft.named_parameters() if p.requires_grad} < own
    booster.save_lora_as_pretrained(model, f"{folder}/after", use_safetensors=True)
    again = PeftModel.from_pretrained(model_of(), f"{folder}/after")
    found = {name: param.detach().double() for name, param in again.named_parameters() if name in own}
    assert_close(found, {name: expected[name] for name in own}, 1e-5, "what was saved")
    booster.close()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 4, "vocab_size": 37}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=True))


@on_ranks(2)
@pytest.mark.parametrize("given", [{"zero_stage": 1}, *full(ZBV)], ids=str)
def test_deferred_model_is_materialized_in_stages(given: dict[str, Any]) -> None:
    with deferred_init():
        lazy = llama()
    booster, _, model, optimizer = boosted(lazy, **given)
    expected = {name: param.detach() for name, param in llama().named_parameters()}
    state = model.state_dict()
    assert_close({name: state[name] for name in expected}, expected, 0.0, "values as they begin")
    pipelined(booster, model, optimizer)
    state, after = model.state_dict(), plain_of_replicas(llama, sgd, dist.get_world_size() // 2)
    assert_close({name: state[name] for name in after}, after, 1e-5, "values after two steps")
    assert not any(torch.equal(after[name], expected[name]) for name in after)
    booster.close()
