"""Fused norms of transformers' models: which are taken, that they compute what they did, and what is left."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from shardwise.shardformer import ShardConfig, changes
from shardwise.shardformer.changes import Kernels, changed_model, kernels_of

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "head_dim": 8,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), 5),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)), 9),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
        ),
        12,
    ),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "one plus the weight": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
    "a layer norm": lambda: CohereForCausalLM(CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"})),
}


def of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.2 * torch.randn(param.shape)
    return model


def fused(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, changes._RmsNorm)]


def fuse(model: nn.Module) -> nn.Module:
    with changed_model(model, Kernels(norms=True), None):
        return model


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_found_and_compute_what_they_did(name: str) -> None:
    model = of(name)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(model)
    assert len(fused(model)) == MODELS[name][1]
    own = dict(plain.named_modules())
    for path, module in model.named_modules():
        if module not in fused(model):
            continue
        weight: Any = module.weight
        x = torch.randn(3, 4, weight.shape[0], generator=torch.Generator().manual_seed(1))
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-6)):
            module.to(dtype)
            own[path].to(dtype)
            results = []
            for each in (module, own[path]):
                given = x.to(dtype).requires_grad_()
                y = each(given)
                results.append([y, *torch.autograd.grad(y.float().square().sum(), (given, each.weight))])
            for one, other in zip(*results, strict=True):
                assert one.dtype == other.dtype == dtype
                assert (one - other).abs().max() <= 4 * tolerance * other.abs().max(), path
    ids = torch.tensor([[1, 2, 3, 4]])
    inputs = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(model.float()(**inputs).loss, plain.float()(**inputs).loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_known_is_left(name: str) -> None:
    model = OTHERS[name]()
    with pytest.warns(UserWarning, match="enable_fused_normalization=True without effect"):
        fuse(model)
    assert not fused(model)


def test_what_the_arguments_mean() -> None:
    assert kernels_of(ShardConfig()) == Kernels()
    assert kernels_of(ShardConfig(enable_all_optimization=True)) == Kernels(True, True)
    assert kernels_of(ShardConfig(enable_fused_normalization=True)) == Kernels(norms=True)
    assert kernels_of(ShardConfig(enable_flash_attention=True)) == Kernels(flash=True)
    with pytest.warns(UserWarning, match=r"enable_jit_fused=True has no effect: call torch\.compile"):
        assert kernels_of(ShardConfig(enable_jit_fused=True)) == Kernels()
