"""What cannot be cut is one error before anything changes, and how heads are divided."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from shardwise.core.parallel.tensor import (
    Architecture,
    Axis,
    Embedding,
    Head,
    ModuleRules,
    ShardSpec,
    cut_model,
    known_architectures,
    propose_architecture,
)
from shardwise.core.parallel.tensor.rules import _is_causal
from shardwise.core.parallel.tensor.shard_spec import Heads
from shardwise.core.parallel.tensor.tables import TABLES
from shardwise.plan import TensorPlan
from tests.support.tensor_cases import CASES, decoder

PLAN = TensorPlan(vocabulary_multiple=4)


def axis(size: int, rank: int = 0) -> Axis:
    """Ranks that exchange nothing."""
    group: Any = SimpleNamespace(size=size, rank=rank)
    return Axis(group)


def message(model: nn.Module, size: int, plan: TensorPlan = PLAN) -> str:
    """Of the error; nothing has changed."""
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    shapes = {name: param.shape for name, param in model.named_parameters()}
    with pytest.raises(ValueError) as error:
        cut_model(model, axis(size), plan)
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before
    assert {name: param.shape for name, param in model.named_parameters()} == shapes
    return str(error.value)


def test_there_is_a_table_and_a_test_for_each_architecture() -> None:
    assert set(TABLES) == set(CASES) and set(TABLES) <= set(known_architectures())


def test_more_ranks_than_heads() -> None:
    found = message(transformers.LlamaForCausalLM(decoder("Llama")), 8)
    assert found.startswith("LlamaForCausalLM cannot be cut over 8 ranks: model.layers.0.self_attn (LlamaAttention): ")
    assert "6 attention heads are fewer than 8 ranks; cut over 6 ranks at most" in found


def test_an_unknown_model_names_the_known_architectures_and_how_to_add_one() -> None:
    found = message(nn.Sequential(nn.Linear(4, 4)), 2)
    assert "Sequential cannot be cut: it has no module of a known architecture (bert, bloom, " in found
    assert "register_architecture(" in found and "CONTRIBUTING.md" in found


def test_an_attribute_that_says_other_heads_than_the_layers_have() -> None:
    model = transformers.BertModel(decoder("Bert"))
    model.encoder.layer[1].attention.self.num_attention_heads = 3
    assert "encoder.layer.1.attention (BertAttention): num_attention_heads is 3, and its layers are for 6" in message(
        model, 2
    )


def test_a_layer_with_a_forward_pass_of_its_own() -> None:
    class Quantised(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).round()

    model = transformers.LlamaForCausalLM(decoder("Llama"))
    model.model.layers[0].mlp.up_proj = Quantised(24, 22)
    assert "a Quantised cannot be cut by columns or rows" in message(model, 2)


class Ours(transformers.LlamaModel):
    """A model of a user's, derived from one that is known; its head is tied, and no rule names it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head = nn.Linear(24, config.vocab_size, bias=False)
        self.head.weight = self.embed_tokens.weight


def test_a_tied_layer_that_no_rule_names_would_take_a_part_for_the_whole() -> None:
    model = Ours(decoder("Llama"))
    assert "head.weight are tied to sharded layers" in message(model, 2)
    named = Architecture("ours", {"Ours": (Embedding("embed_tokens"), Head("head"))})
    tp_plan = cut_model(model, axis(2), TensorPlan(architecture=named, vocabulary_multiple=4))
    part = tp_plan.part_of(model.head.weight)
    assert part is not None and part.shape == (16, 24) and part is tp_plan.part_of(model.embed_tokens.weight)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1), (12, 4), (8, 2)])
def test_heads_are_divided_in_groups(heads: int, kv_heads: int, ranks: int) -> None:
    """Every query head is on one rank, together with the key head that it reads, as the local grouping finds it."""
    found, group = Heads.over(heads, kv_heads, ranks), heads // kv_heads
    seen = []
    for rank in range(ranks):
        (first, end), (kv, _) = found.query[rank], found.kv[rank]
        queries, keys = found.counts(rank)
        assert queries % keys == 0 and queries >= 1
        seen += list(range(first, end))
        assert [kv + at // (queries // keys) for at in range(queries)] == [head // group for head in range(first, end)]
    assert seen == list(range(heads))
    blocks, groups = found.of_all(2), found.of_groups(2)
    for rank in range(ranks):
        queries, keys = found.counts(rank)
        for ranges in (blocks[rank], groups[rank]):
            assert sum(end - start for start, end in ranges) == 2 * (queries + 2 * keys)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="6 attention heads do not divide into groups for 4 key/value heads"):
        Heads.over(6, 4, 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_of_a_rank_are_what_a_formula_says(ranks: int) -> None:
    """Of a llama with as many heads: everything but norms is divided, the vocabulary with its padding."""
    config = decoder("Llama", num_attention_heads=4, num_key_value_heads=4, intermediate_size=24, hidden_size=32)
    model = transformers.LlamaForCausalLM(config)
    tp_plan = cut_model(model, axis(ranks), PLAN)
    held = 0
    for param in model.parameters():
        part = tp_plan.part_of(param)
        held += (part.shape if part is not None else param.shape).numel()
    rows = 29 + -29 % (4 * ranks)
    norms = 5 * 32
    assert held == norms + (2 * rows * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 24)) // ranks


# ---- proposed by the model's own plan


def test_a_plan_says_what_the_table_says() -> None:
    """Of Llama, Qwen3 and Qwen3-MoE each parameter's part is the same by either."""
    for kind in ("Llama", "Qwen3", "Qwen3Moe"):
        model = getattr(transformers, f"{kind}ForCausalLM")(decoder(kind))
        own = TensorPlan(architecture=propose_architecture(model), vocabulary_multiple=4)
        by_table, by_plan = (cut_model(model, axis(2, rank=1), plan) for plan in (PLAN, own))
        parts = {name: by_table.part_of(param) for name, param in model.named_parameters()}
        assert sum(part is not None for part in parts.values()) >= 10
        assert parts == {name: by_plan.part_of(param) for name, param in model.named_parameters()}


def test_an_unknown_model_with_a_plan_is_told_of_it() -> None:
    model = transformers.GraniteForCausalLM(decoder("Granite"))
    assert "propose_architecture(model)" in message(model, 2)
    assert "propose_architecture(model)" not in message(nn.Sequential(nn.Linear(4, 4)), 2)


def test_plans_that_no_rule_says() -> None:
    with pytest.raises(ValueError, match="StableLmForCausalLM has no tensor-parallel plan of its own"):
        propose_architecture(transformers.StableLmForCausalLM(decoder("StableLm")))
    model = transformers.LlamaForCausalLM(decoder("Llama"))
    model._tp_plan = {"model.layers.*.mlp.up_proj": "something"}
    with pytest.raises(ValueError, match=r"has model\.layers\.\*\.mlp\.up_proj: 'something', which no rule says"):
        propose_architecture(model)
    model = transformers.Qwen3ForCausalLM(decoder("Qwen3"))
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if "norm" not in name}
    with pytest.raises(ValueError, match=r"says nothing of k_norm\.weight, q_norm\.weight, next to layers"):
        propose_architecture(model)


# ---- adapters


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "only LoRA is cut with its layer"),
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "a variant of LoRA that needs whole layers"),
        (peft.LoraConfig(target_modules=["embed_tokens"]), "only an nn.Embedding can be cut, without an adapter"),
        (peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "a ModulesToSaveWrapper cannot"),
    ],
    ids=["ia3", "dora", "embedding", "saved head"],
)
def test_an_adapter_that_cannot_be_cut_is_named(config: Any, text: str) -> None:
    model = peft.get_peft_model(transformers.LlamaForCausalLM(decoder("Llama")), config)
    assert text in message(model, 2)


class _Says:
    """An architecture that is no set of rules."""

    def collect(self, model: nn.Module, tp_plan: object) -> None:
        raise AssertionError("not asked")


class _Alone(nn.Module):
    """Attention that is in no list of layers, and a part of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = decoder("Llama")
        self.attention = transformers.models.llama.modeling_llama.LlamaAttention(self.config, 0)


class _OwnRule:
    """Cuts a layer of which it does not say where its block begins."""

    def collect(self, rules: ModuleRules) -> None:
        rules.columns("gate_proj", ShardSpec.even(0, 22, rules.ranks).ranges)


def test_sequences_that_cannot_be_divided() -> None:
    divided = replace(PLAN, sequence="split_gather")
    llama = transformers.LlamaForCausalLM(decoder("Llama"))
    found = message(llama, 2, replace(divided, architecture=_Says()))
    assert "sequence='split_gather' with" in found and "only an Architecture of rules" in found
    found = message(_Alone(), 2, divided)
    assert "_Alone has no list of layers (nn.ModuleList) that all hold sharded attention" in found
    rules = {"LlamaAttention": TABLES["llama"]["LlamaAttention"], "LlamaMLP": (_OwnRule(),)}
    found = message(llama, 2, replace(divided, architecture=Architecture("own", rules)))
    assert "model.layers.0: no rule says where the block of a Linear begins" in found and "Site.block" in found


def test_logits_stay_cut_only_for_a_forward_pass_of_transformers_own() -> None:
    class Own(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Plain(transformers.LlamaForCausalLM):
        pass

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, **sizes)
    model: Any = transformers.LlamaForCausalLM(config)
    assert _is_causal(model) and _is_causal(Plain(config)) and not _is_causal(Own(config))
    model.forward = model.forward  # as who stands around a model does
    assert not _is_causal(model)
