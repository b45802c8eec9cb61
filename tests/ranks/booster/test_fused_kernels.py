"""Fused norms of models that are cut and sharded, against the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, HybridParallelPlugin
from shardwise.shardformer import ShardConfig, ShardFormer
from shardwise.shardformer.changes import Kernels, _RmsNorm, changed_model
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import LENGTH, VOCABULARY

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "head_dim": 8,
}


def made() -> Any:
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model.double().train()


def texts() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plain() -> tuple[Tensor, dict[str, Tensor]]:
    model = made()
    with changed_model(model, Kernels(norms=True), None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**texts()).loss
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: param.detach() for name, param in model.named_parameters()}


def behind_plugins() -> None:
    loss, values = plain()
    plugins = (
        HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", zero_stage=1, enable_all_optimization=True),
        GeminiPlugin(precision="fp32", min_chunk_size_m=0.001, enable_fused_normalization=True),
    )
    for plugin in plugins:
        model = made()
        booster = Booster(plugin=plugin)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        if isinstance(plugin, HybridParallelPlugin):
            assert model.config._attn_implementation == "sdpa"
        assert sum(isinstance(module, _RmsNorm) for module in model.modules()) == 9
        found = boosted(**texts()).loss
        booster.backward(found, optimizer)
        optimizer.step()
        assert abs(found.item() - loss.item()) < 1e-6
        state = boosted.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-6, type(plugin).__name__)
        booster.close()


def without() -> None:
    loss, _ = plain()
    model, _ = ShardFormer(ShardConfig(enable_fused_normalization=True)).optimize(made())
    assert abs(model(**texts()).loss.item() - loss.item()) < 1e-6


def test_models_behind_plugins() -> None:
    run_ranks(2, behind_plugins)


def test_a_configuration() -> None:
    run_ranks(2, without)
