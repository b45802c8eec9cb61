"""``use_fp8`` and ``fp8_communication`` behind the plugins, fused norms, and ShardFormer without a Booster.

* fp8: losses near those of the same run without it, which layers multiply in fp8, checkpoints that do not depend on it.
* Fused norms of sharded models, against the same model in one process.
* ShardFormer over a process group, against the unsharded model in fp64.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
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
from shardwise.core.parallel.float8 import convert_to_float8_training
from shardwise.core.parallel.tensor import parts_of
from shardwise.shardformer import GradientCheckpointConfig, ShardConfig, ShardFormer
from shardwise.shardformer.model_optimizations import FusedRmsNorm, Kernels, changed_model
from shardwise.testing import assert_close
from tests.support.hybrid_setup import LENGTH, POLICIES, VOCABULARY, Texts, made
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import full

ROWS = 4
BF16: dict[str, Any] = {"precision": "bf16"}
TP: dict[str, Any] = {"tp_size": 2, "pp_size": 1, "zero_stage": 1, **BF16}
PP: dict[str, Any] = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "precision": "fp32"}
AGAIN = {"gradient_checkpoint_config": GradientCheckpointConfig(1.0)}
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLUGINS: dict[str, Callable[[bool], Any]] = {
    "zero1": lambda on: LowLevelZeroPlugin(stage=1, use_fp8=on, **BF16),
    "zero2": lambda on: LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=64.0, use_fp8=on),
    "gemini": lambda on: GeminiPlugin(min_chunk_size_m=0.001, use_fp8=on, **BF16),
    "hybrid_tp": lambda on: HybridParallelPlugin(use_fp8=on, **TP, **AGAIN),
    "ddp": lambda on: TorchDDPPlugin(),
    "fsdp": lambda on: TorchFSDPPlugin(),
    # For the other plugins, fp8_communication is a setting of the plan: tests/ranks/engine compares it bit for bit.
    "fsdp sends": lambda on: TorchFSDPPlugin(mixed_precision=MIXED, fp8_communication=on),
    "hybrid_tp sends": lambda on: HybridParallelPlugin(fp8_communication=on, **TP),
    "hybrid_pp sends": lambda on: HybridParallelPlugin(fp8_communication=on, **PP),
}
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}


class Products:
    """Count the calls of ``float8.product``."""

    def __init__(self) -> None:
        self.count, self._own = 0, float8.product

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.count += 1
        return self._own(*args, **options)


def texts(rank: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def loss_of(out: Any, _: Any) -> Tensor:
    return out.loss


def curve(name: str, on: bool, folder: str, steps: int, lr: float) -> tuple[list[float], int]:
    """Return the mean losses of a few steps, and the number of fp8 products in the last step."""
    plugin = PLUGINS[name](on)
    model = made("llama", torch.float32, **SIZES)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)
    if on and name in ("ddp", "fsdp"):
        with warnings.catch_warnings(action="ignore"):
            convert_to_float8_training(model)
    names = list(dict(model.named_parameters()))
    booster = Booster(plugin=plugin)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr)
    with warnings.catch_warnings(action="ignore"):
        model, optimizer, *_ = booster.boost(model, optimizer)
    losses, inputs, products = [], texts(plugin.data_parallel()[0]), Products()
    for _ in range(steps):
        products.count = 0
        with mock.patch.object(float8, "product", products):
            if "pp" in name:
                batches = iter([inputs])
                found = booster.execute_pipeline(batches, model, loss_of, optimizer, broadcast_loss=True)
                loss = found["loss"]
            else:
                loss = model(**inputs).loss
                booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        told = everywhere(loss.item())
        losses.append(sum(told) / len(told))
    state = model.state_dict()
    assert set(names) <= set(state)
    sums = [value.double().sum().item() for value in state.values() if isinstance(value, Tensor)]
    assert everywhere(sums) == [sums] * dist.get_world_size(), "all ranks see parameters alike"
    if on and name in ("zero2", "hybrid_tp"):
        booster.save_model(model, folder, shard=True, use_safetensors=True)
        booster.load_model(model, folder)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, state[key], rtol=2**-7, atol=1e-6)
    booster.close()
    return losses, products.count


@on_ranks(2, timeout=240.0)
@pytest.mark.parametrize("name", [*full("zero1"), "zero2", *full("gemini"), "hybrid_tp", *full("ddp", "fsdp")])
def test_losses_with_use_fp8(name: str, tmp_path: Path) -> None:
    (plain, none), (eight, products) = (curve(name, on, str(tmp_path), 6, 0.01) for on in (False, True))
    # Seven per layer and the head, one forward and two backward; sharded k and v are too narrow for fp8.
    whole, cut = 3 * (2 * 7 + 1), 3 * (2 * 5 + 1) + 2 * 5  # checkpointed layers run forward twice
    assert none == 0 and products == (cut if name == "hybrid_tp" else whole)
    assert plain[-1] < 0.95 * plain[0]
    assert plain != eight == pytest.approx(plain, rel=0.05)


@on_ranks(timeout=240.0)
@pytest.mark.parametrize(("name", "ranks"), [("hybrid_pp sends", 2), *full(("fsdp sends", 4), ("hybrid_tp sends", 4))])
def test_losses_with_fp8_communication(name: str, ranks: int, tmp_path: Path) -> None:
    (plain, _), (compressed, _) = (curve(name, on, str(tmp_path), 8, 0.03) for on in (False, True))
    assert plain[-1] < 0.9 * plain[0]
    assert plain != compressed == pytest.approx(plain, rel=0.1)


@on_ranks(2)
def test_fp8_communication_of_torch_ddp() -> None:
    """The mean of DDP is within the error bound and equal on all ranks; an overflow of one rank reaches all."""
    torch.manual_seed(0)
    model = nn.Linear(50, 7)
    booster = Booster(plugin=TorchDDPPlugin(fp8_communication=True))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = [torch.randn(4, 50, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    rank = dist.get_rank()
    booster.backward(boosted(x[rank]).square().mean(), optimizer)
    terms = []
    for each in x:
        own = nn.Linear(50, 7)
        own.load_state_dict(model.state_dict())
        own(each).square().mean().backward()
        terms.append(own.weight.grad.clone())
    found = model.weight.grad
    bound = 0.27 * torch.stack(terms).abs().mean(0) + 2**-28 * torch.stack(terms).abs().max()
    assert ((found - torch.stack(terms).mean(0)).abs() <= bound).all()
    told = everywhere(found)
    assert torch.equal(told[0], told[1])
    optimizer.zero_grad()
    booster.backward(boosted(x[rank] * (1e30 if rank else 1.0)).square().mean(), optimizer)
    assert not model.weight.grad.isfinite().all()
    booster.close()
    with pytest.raises(ValueError, match=r"fp8_communication=True, but 'weight' has torch.float64"):
        Booster(plugin=TorchDDPPlugin(fp8_communication=True)).boost(nn.Linear(2, 2).double())


def test_fp8_communication_with_hybrid_shard_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"fp8_communication=True.*HYBRID_SHARD"):
        TorchFSDPPlugin(fp8_communication=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@on_ranks(2)
def test_fp8_communication_of_shardformer() -> None:
    found: list[list[float]] = []
    for on in (False, True):
        model, _ = ShardFormer(ShardConfig(fp8_communication=on)).optimize(made("llama", torch.float32))
        found.append([])
        for step in range(2):
            loss = model(**texts(step)).loss
            loss.backward()
            found[-1].append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert found[0] != found[1] == pytest.approx(found[0], rel=0.05)


def kernels_made() -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model.double().train()


def plain() -> tuple[Tensor, dict[str, Tensor]]:
    model = kernels_made()
    with changed_model(model, Kernels(norms=True), None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**texts(1)).loss
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: param.detach() for name, param in model.named_parameters()}


@on_ranks(2)
def test_fused_norms_behind_plugins() -> None:
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
        assert sum(isinstance(module, FusedRmsNorm) for module in model.modules()) == 9
        found = boosted(**texts(1)).loss
        booster.backward(found, optimizer)
        optimizer.step()
        assert abs(found.item() - loss.item()) < 1e-6
        state = boosted.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-6, type(plugin).__name__)
        booster.close()


@on_ranks(2)
def test_fused_norms_of_shardformer() -> None:
    loss, _ = plain()
    model, _ = ShardFormer(ShardConfig(enable_fused_normalization=True)).optimize(kernels_made())
    assert abs(model(**texts(1)).loss.item() - loss.item()) < 1e-6


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "pairs": (4, {"enable_flash_attention": True}),
    "all": (2, {"gradient_checkpoint_config": GradientCheckpointConfig(0.5), "make_vocab_size_divisible_by": 3}),
    "own tokens": (2, {"enable_sequence_parallelism": True}),
    "none": (2, {"enable_tensor_parallelism": False}),
}
"""Number of ranks and configuration of a model sharded over pairs of ranks, over all ranks, or not at all."""


@on_ranks()
@pytest.mark.parametrize("kind", [*full("llama"), "gpt2"])
@pytest.mark.parametrize(("way", "ranks"), [(way, ranks) for way, (ranks, _) in WAYS.items()])
def test_shardformer_shards_the_model_in_place(kind: str, way: str, ranks: int) -> None:
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2] if way == "pairs" else None
    whole, given = made(kind), made(kind)
    expected = whole(**Texts(4).items)
    expected.loss.backward()
    config = ShardConfig(tensor_parallel_process_group=group, parallel_output=False, **WAYS[way][1])
    policy = None if way == "own tokens" else POLICIES[kind]()
    model, shared = ShardFormer(shard_config=config).optimize(given, policy)
    assert model is given and shared == []
    out = model(**Texts(4).items)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-10, atol=1e-12)
    parts = parts_of(model)
    assert (config.tensor_parallel_size == 1) is not bool(parts)
    grads = {name: param.grad for name, param in whole.named_parameters()}
    cut = {name: parts[name].of(grad) if name in parts else grad for name, grad in grads.items()}  # type: ignore[arg-type]
    found = {name: param.grad for name, param in model.named_parameters()}
    assert_close(found, cut, 1e-10, f"gradients of {kind}")  # type: ignore[arg-type]


@on_ranks(2)
def test_refused_models_of_shardformer_do_not_change() -> None:
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
