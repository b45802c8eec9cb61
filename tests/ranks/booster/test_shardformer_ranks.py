"""ShardFormer without a Booster: a model cut over a process group, against the same model whole, in fp64."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.core.parallel.tensor import parts_of
from shardwise.shardformer import GradientCheckpointConfig, ShardConfig, ShardFormer
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import POLICIES, Texts, made
from tests.support.sets import full


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


def _refused() -> None:
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


def test_what_cannot_be_cut_is_left_as_it_was() -> None:
    run_ranks(2, _refused)
