"""Fused norms of models that are cut and sharded, against the same model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid_setup import LENGTH, VOCABULARY
from sets import full
from torch import Tensor
from transformers import Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, HybridParallelPlugin
from shardwise.shardformer import ShardConfig, ShardFormer
from shardwise.shardformer.shard.kernels import _Fused, fuse_norms
from shardwise.testing import assert_close, run_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "head_dim": 8,
}


def made(kind: str) -> Any:
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)) if kind == "qwen3" else Gemma3ForCausalLM(Gemma3TextConfig(**SIZES))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model.double().train()


def texts() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plain(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = made(kind)
    fuse_norms(model, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**texts()).loss
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: param.detach() for name, param in model.named_parameters()}


def behind_plugins(kinds: list[str]) -> None:
    for kind in kinds:
        loss, values = plain(kind)
        plugins = (
            HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", zero_stage=1, enable_all_optimization=True),
            GeminiPlugin(precision="fp32", min_chunk_size_m=0.001, enable_fused_normalization=True),
        )
        for plugin in plugins:
            model = made(kind)
            booster = Booster(plugin=plugin)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            if isinstance(plugin, HybridParallelPlugin):
                with pytest.warns(UserWarning, match="enable_jit_fused=True without effect"):
                    boosted, optimizer, *_ = booster.boost(model, optimizer)
                assert model.config._attn_implementation == "sdpa"
            else:
                boosted, optimizer, *_ = booster.boost(model, optimizer)
            assert sum(isinstance(module, _Fused) for module in model.modules()) >= 9
            found = boosted(**texts()).loss
            booster.backward(found, optimizer)
            optimizer.step()
            assert abs(found.item() - loss.item()) < 1e-6
            state = boosted.state_dict()
            assert_close({name: state[name] for name in values}, values, 1e-6, kind)
            booster.close()


def without() -> None:
    loss, _ = plain("qwen3")
    model, _ = ShardFormer(ShardConfig(enable_fused_normalization=True)).optimize(made("qwen3"))
    assert abs(model(**texts()).loss.item() - loss.item()) < 1e-6


@pytest.mark.parametrize("kind", ["qwen3", *full("gemma3")])
def test_models_behind_plugins(kind: str) -> None:
    run_ranks(2, behind_plugins, [kind])


def test_a_configuration() -> None:
    run_ranks(2, without)
