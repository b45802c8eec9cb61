"""use_fp8 behind the plugins: losses beside those of the same run without, which layers multiply so, checkpoints that
know nothing of it, activation checkpointing, LoRA; and models of torch's own wrappers.

Fused norms of models that are cut and sharded, against the same model in one process.
ShardFormer without a Booster: a model cut over a process group, against the same model whole, in fp64.
"""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwise.core.parallel import float8
from shardwise.core.parallel.float8 import multiply_in_8_bits
from shardwise.core.parallel.tensor import parts_of
from shardwise.shardformer import GradientCheckpointConfig, ShardConfig, ShardFormer
from shardwise.shardformer.changes import Kernels, _RmsNorm, changed_model
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import LENGTH, POLICIES, VOCABULARY, Texts, made
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import full

STEPS, ROWS = 6, 4
PLUGINS: dict[str, Callable[[bool], Any]] = {
    "zero1": lambda on: LowLevelZeroPlugin(stage=1, precision="bf16", use_fp8=on),
    "zero2": lambda on: LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=64.0, use_fp8=on),
    "gemini": lambda on: GeminiPlugin(precision="bf16", min_chunk_size_m=0.001, use_fp8=on),
    "hybrid_tp": lambda on: HybridParallelPlugin(
        tp_size=2,
        pp_size=1,
        precision="bf16",
        zero_stage=1,
        use_fp8=on,
        gradient_checkpoint_config=GradientCheckpointConfig(1.0),
    ),
    "ddp": lambda on: TorchDDPPlugin(),
    "fsdp": lambda on: TorchFSDPPlugin(),
}
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}


class Products:
    """Calls of the product in 8 bits."""

    def __init__(self) -> None:
        self.count, self._own = 0, float8.product

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.count += 1
        return self._own(*args, **options)


def texts(rank: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def curve(name: str, on: bool, folder: str) -> tuple[list[float], int]:
    """The mean losses of a few steps, and the products in 8 bits of the last."""
    plugin = PLUGINS[name](on)
    model = made("llama", torch.float32, **SIZES)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)
    if on and name in ("ddp", "fsdp"):
        with warnings.catch_warnings(action="ignore"):
            multiply_in_8_bits(model)
    names = list(dict(model.named_parameters()))
    booster = Booster(plugin=plugin)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warnings.catch_warnings(action="ignore"):
        model, optimizer, *_ = booster.boost(model, optimizer)
    losses, index, products = [], plugin.data_parallel()[0], Products()
    for _ in range(STEPS):
        products.count = 0
        with mock.patch.object(float8, "product", products):
            loss = model(**texts(index)).loss
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        told = everywhere(loss.item())
        losses.append(sum(told) / len(told))
    state = model.state_dict()
    assert set(names) <= set(state)
    if on and name in ("zero2", "hybrid_tp"):
        booster.save_model(model, folder, shard=True, use_safetensors=True)
        booster.load_model(model, folder)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, state[key], rtol=2**-7, atol=1e-6)
    booster.close()
    return losses, products.count


def curves(name: str, folder: str) -> tuple[tuple[list[float], int], tuple[list[float], int]]:
    return curve(name, False, folder), curve(name, True, f"{folder}/{name}")


@pytest.mark.parametrize("name", [*full("zero1"), "zero2", *full("gemini"), "hybrid_tp", *full("ddp", "fsdp")])
def test_losses_fall_as_without(name: str, tmp_path: Path) -> None:
    (plain, none), (eight, products) = run_ranks(2, curves, name, str(tmp_path), timeout=240.0)[0]
    # Seven in a layer and the head, forward and twice backward; k and v are too narrow where they are cut.
    whole, cut = 3 * (2 * 7 + 1), 3 * (2 * 5 + 1) + 2 * 5  # and once more forward in layers that are computed again
    assert none == 0
    assert products == (cut if name == "hybrid_tp" else whole)
    assert plain[-1] < 0.95 * plain[0]
    for one, other in zip(plain, eight, strict=True):
        assert abs(one - other) < 0.05 * one
    assert plain != eight


KERNELS_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "head_dim": 8,
}


def kernels_made() -> Any:
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**KERNELS_SIZES))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model.double().train()


def kernels_texts() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plain() -> tuple[Tensor, dict[str, Tensor]]:
    model = kernels_made()
    with changed_model(model, Kernels(norms=True), None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**kernels_texts()).loss
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: param.detach() for name, param in model.named_parameters()}


@on_ranks(2)
def test_models_behind_plugins() -> None:
    loss, values = plain()
    plugins = (
        HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", zero_stage=1, enable_all_optimization=True),
        GeminiPlugin(precision="fp32", min_chunk_size_m=0.001, enable_fused_normalization=True),
    )
    for plugin in plugins:
        model = kernels_made()
        booster = Booster(plugin=plugin)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        if isinstance(plugin, HybridParallelPlugin):
            assert model.config._attn_implementation == "sdpa"
        assert sum(isinstance(module, _RmsNorm) for module in model.modules()) == 9
        found = boosted(**kernels_texts()).loss
        booster.backward(found, optimizer)
        optimizer.step()
        assert abs(found.item() - loss.item()) < 1e-6
        state = boosted.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-6, type(plugin).__name__)
        booster.close()


@on_ranks(2)
def test_a_configuration() -> None:
    loss, _ = plain()
    model, _ = ShardFormer(ShardConfig(enable_fused_normalization=True)).optimize(kernels_made())
    assert abs(model(**kernels_texts()).loss.item() - loss.item()) < 1e-6


def inputs() -> dict[str, torch.Tensor]:
    texts = Texts(4)
    return {name: values[:4] for name, values in texts.items.items()}


def _optimized(kind: str, group: dist.ProcessGroup | None, policy: bool = True, **given: Any) -> None:
    whole = made(kind)
    expected = whole(**inputs())
    expected.loss.backward()
    config = ShardConfig(tensor_parallel_process_group=group, parallel_output=False, **given)
    given_model = made(kind)
    model, shared = ShardFormer(shard_config=config).optimize(given_model, POLICIES[kind]() if policy else None)
    assert model is given_model and shared == []
    out = model(**inputs())
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-10, atol=1e-12)
    parts = parts_of(model)
    assert (config.tensor_parallel_size == 1) is not bool(parts)
    grads = {name: param.grad for name, param in whole.named_parameters()}
    cut = {name: parts[name].of(grad) if name in parts else grad for name, grad in grads.items()}  # type: ignore[arg-type]
    found = {name: param.grad for name, param in model.named_parameters()}
    assert_close(found, cut, 1e-10, f"gradients of {kind}")  # type: ignore[arg-type]
    del model, out
    gc.collect()


def _over_pairs(kind: str) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    _optimized(kind, pairs[dist.get_rank() // 2], enable_flash_attention=True)


def _over_all(kind: str) -> None:
    _optimized(kind, None, gradient_checkpoint_config=GradientCheckpointConfig(0.5), make_vocab_size_divisible_by=3)


def _with_own_tokens(kind: str) -> None:
    _optimized(kind, None, policy=False, enable_sequence_parallelism=True)


def _over_none(kind: str) -> None:
    _optimized(kind, None, enable_tensor_parallelism=False)


@pytest.mark.parametrize("kind", [*full("llama"), "gpt2"])
def test_a_model_is_cut_where_it_stands(kind: str) -> None:
    run_ranks(4, _over_pairs, kind)
    run_ranks(2, _over_all, kind)
    run_ranks(2, _with_own_tokens, kind)
    run_ranks(2, _over_none, kind)


@on_ranks(2)
def test_what_cannot_be_cut_is_left_as_it_was() -> None:
    model = made("llama", num_attention_heads=3, num_key_value_heads=3, attn_implementation="eager")
    before = {name: (id(param), param.detach().clone()) for name, param in model.named_parameters()}
    config = ShardConfig(enable_flash_attention=True, gradient_checkpoint_config=GradientCheckpointConfig(1.0))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate_proj as Linear1D_Col: an output of 23 "):
        broken = made("llama", intermediate_size=23, attn_implementation="eager")
        ShardFormer(config).optimize(broken, POLICIES["llama"]())
    assert broken.config._attn_implementation == "eager" and not parts_of(broken)
    assert not any(layer.gradient_checkpointing for layer in broken.model.layers)
    model, _ = ShardFormer(ShardConfig(enable_tensor_parallelism=False)).optimize(model)
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1])
