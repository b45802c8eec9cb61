"""Tests of the tensor-parallel partition in one process.

- ``cut_model``: models that cannot be sharded raise one error before anything changes; heads are divided in groups.
- ``propose_architecture``: rules from a model's own tensor-parallel plan.
- ``ShardSpec`` and ``StoredCut``: shards cover the dimension, and sharding and unsharding are inverse.
- ``RankRng``: random numbers of a rank inside a sharded region, and the common ones after it, also for CUDA generators.
"""

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise.core.parallel.tensor.stored_order as order
from shardwise.core.base.rng import RankRng
from shardwise.core.parallel import tensor
from shardwise.core.parallel.tensor import Architecture, Axis, ShardSpec, cut_model, propose_architecture
from shardwise.core.parallel.tensor.known_models import TABLES
from shardwise.core.parallel.tensor.module_rules import _is_causal
from shardwise.core.parallel.tensor.shard_spec import Heads, Part, shares
from shardwise.core.parallel.tensor.stored_order import StoredCut, full_runs, own_runs, read_logical, read_part
from shardwise.plan import TensorPlan
from tests.support.on_ranks import raises
from tests.support.tensor_cases import CASES, decoder

PLAN = TensorPlan(vocabulary_multiple=4)


def axis(size: int, rank: int = 0) -> Axis:
    """Return an axis whose ranks do not communicate."""
    group: Any = SimpleNamespace(size=size, rank=rank)
    return Axis(group)


def message(model: nn.Module, size: int, plan: TensorPlan = PLAN) -> str:
    """Return the message of the error of ``cut_model``, and check that the model is unchanged."""
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    shapes = {name: param.shape for name, param in model.named_parameters()}
    error = raises(ValueError, None, lambda: cut_model(model, axis(size), plan))
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before
    assert {name: param.shape for name, param in model.named_parameters()} == shapes
    return error


def test_each_architecture_has_rules_and_a_test() -> None:
    assert set(TABLES) == set(CASES) and set(TABLES) <= set(tensor.known_architectures())


class Quantized(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).round()


def test_models_that_cannot_be_sharded() -> None:
    """More ranks than heads, unknown models with and without a plan of their own, and layers that cannot be sharded."""
    found = message(transformers.LlamaForCausalLM(decoder("Llama")), 8)
    assert found.startswith("LlamaForCausalLM cannot be cut over 8 ranks: model.layers.0.self_attn (LlamaAttention): ")
    assert "6 attention heads are fewer than 8 ranks; cut over 6 ranks at most" in found
    found = message(nn.Sequential(nn.Linear(4, 4)), 2)
    assert (
        "Sequential cannot be cut: it has no module of a known architecture" in found
        and "Known: bert, bloom, " in found
    )
    assert "register_architecture(" in found and "docs/hybrid-parallel.md" in found
    asked = "propose_architecture(model)"
    assert asked not in found and asked in message(transformers.GraniteForCausalLM(decoder("Granite")), 2)
    model = transformers.BertModel(decoder("Bert"))
    model.encoder.layer[1].attention.self.num_attention_heads = 3
    told = "encoder.layer.1.attention (BertAttention): num_attention_heads is 3, and its layers are for 6"
    assert told in message(model, 2)
    model = transformers.LlamaForCausalLM(decoder("Llama"))
    model.model.layers[0].mlp.up_proj = Quantized(24, 22)
    assert "a Quantized cannot be cut by columns or rows" in message(model, 2)


class Ours(transformers.LlamaModel):
    """A user's subclass of a known model, with a tied head that no rule names."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head = nn.Linear(24, config.vocab_size, bias=False)
        self.head.weight = self.embed_tokens.weight


def test_tied_layer_without_a_rule_raises() -> None:
    model = Ours(decoder("Llama"))
    assert "head.weight are tied to sharded layers" in message(model, 2)
    named = Architecture("ours", {"Ours": (tensor.Embedding("embed_tokens"), tensor.Head("head"))})
    tp_plan = cut_model(model, axis(2), TensorPlan(architecture=named, vocabulary_multiple=4))
    part = tp_plan.part_of(model.head.weight)
    assert part is not None and part.shape == (16, 24) and part is tp_plan.part_of(model.embed_tokens.weight)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1), (12, 4), (8, 2)])
def test_heads_are_divided_in_groups(heads: int, kv_heads: int, ranks: int) -> None:
    """Each query head is on one rank, together with the key head that it uses in the rank's local grouping."""
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_number_of_parameters_of_a_rank(ranks: int) -> None:
    """If there are as many key heads as query heads, all but the norms is sharded; the vocabulary is padded."""
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


def test_proposed_architecture_matches_the_rules() -> None:
    """Both give the same shard of each parameter of Llama, Qwen3 and Qwen3-MoE."""
    for kind in ("Llama", "Qwen3", "Qwen3Moe"):
        model = getattr(transformers, f"{kind}ForCausalLM")(decoder(kind))
        own = TensorPlan(architecture=propose_architecture(model), vocabulary_multiple=4)
        by_table, by_plan = (cut_model(model, axis(2, rank=1), plan) for plan in (PLAN, own))
        parts = {name: by_table.part_of(param) for name, param in model.named_parameters()}
        assert sum(part is not None for part in parts.values()) >= 10
        assert parts == {name: by_plan.part_of(param) for name, param in model.named_parameters()}


def test_unsupported_tensor_parallel_plans() -> None:
    model = transformers.StableLmForCausalLM(decoder("StableLm"))
    raises(ValueError, "StableLmForCausalLM has no tensor-parallel plan of its own", propose_architecture, model)
    model = transformers.LlamaForCausalLM(decoder("Llama"))
    model._tp_plan = {"model.layers.*.mlp.up_proj": "something"}
    told = r"has model\.layers\.\*\.mlp\.up_proj: 'something', which no rule says"
    raises(ValueError, told, propose_architecture, model)
    model = transformers.Qwen3ForCausalLM(decoder("Qwen3"))
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if "norm" not in name}
    raises(ValueError, r"says nothing of k_norm\.weight, q_norm\.weight, next to layers", propose_architecture, model)


# ---- adapters


def test_adapters_that_cannot_be_sharded() -> None:
    for config, text in (
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "only LoRA is cut with its layer"),
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "a variant of LoRA that needs whole layers"),
        (peft.LoraConfig(target_modules=["embed_tokens"]), "only an nn.Embedding can be cut, without an adapter"),
        (peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "a ModulesToSaveWrapper cannot"),
    ):
        assert text in message(peft.get_peft_model(transformers.LlamaForCausalLM(decoder("Llama")), config), 2)


class _Says:
    """An architecture without rules."""

    def collect(self, model: nn.Module, tp_plan: object) -> None:
        raise AssertionError("not asked")


class _Alone(nn.Module):
    """Attention outside of any list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = decoder("Llama")
        self.attention = transformers.models.llama.modeling_llama.LlamaAttention(self.config, 0)


class _OwnRule:
    """A rule that shards a layer without saying where its sequence-parallel block begins."""

    def collect(self, rules: tensor.ModuleRules) -> None:
        rules.columns("gate_proj", ShardSpec.even(0, 22, rules.ranks).ranges)


def test_unsupported_sequence_parallel_models() -> None:
    divided = replace(PLAN, sequence="split_gather")
    llama = transformers.LlamaForCausalLM(decoder("Llama"))
    found = message(llama, 2, replace(divided, architecture=_Says()))
    assert "sequence='split_gather' with" in found and "only an Architecture of rules" in found
    found = message(_Alone(), 2, divided)
    assert "_Alone has no list of layers (nn.ModuleList) that all hold sharded attention" in found
    rules = {"LlamaAttention": TABLES["llama"]["LlamaAttention"], "LlamaMLP": (_OwnRule(),)}
    found = message(llama, 2, replace(divided, architecture=Architecture("own", rules)))
    assert "model.layers.0: no rule says where the block of a Linear begins" in found and "Site.block" in found


def test_logits_stay_sharded_for_the_original_forward_only() -> None:
    class Own(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Plain(transformers.LlamaForCausalLM):
        pass

    config = decoder("Llama")
    model: Any = transformers.LlamaForCausalLM(config)
    assert _is_causal(model) and _is_causal(Plain(config)) and not _is_causal(Own(config))
    model.forward = model.forward  # as a wrapper of the model does
    assert not _is_causal(model)


Cut = tuple[tuple[int, ...], ShardSpec]


@st.composite
def cuts(draw: Any) -> Cut:
    """Draw a shape and a ``ShardSpec``: blocks that may be uneven, empty, replicated, in any order, or padded."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    ranges: list[list[tuple[int, int]]] = [[], [], []]
    at = 0
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(0, 4))
        for holder in draw(st.sets(st.integers(0, 2), min_size=1)):
            ranges[holder].insert(draw(st.integers(0, len(ranges[holder]))), (at, at + size))
        at += size
    shape[dim] = draw(st.integers(max(at - 2, 0), at))  # elements above this size are padding
    return tuple(shape), ShardSpec(dim, at, tuple(tuple(each) or ((0, 0),) for each in ranges))


def stored_by_definition(whole: torch.Tensor, stored: StoredCut | None) -> torch.Tensor:
    """Return the tensor in stored order, computed as the documentation defines it."""
    if stored is None:
        return whole.reshape(-1)
    parts = []
    for ranges in stored.ranges:
        index = [i for start, end in ranges for i in range(start, end)]
        parts.append(whole.index_select(stored.dim, torch.tensor(index, dtype=torch.int64)).reshape(-1))
    return torch.cat(parts)


def reader(flat: torch.Tensor) -> order.ReadInto:
    def read(start: int, out: torch.Tensor) -> None:
        assert start >= 0 and out.numel() > 0 and start + out.numel() <= flat.numel() and out.is_contiguous()
        out.copy_(flat[start : start + out.numel()])

    return read


@settings(max_examples=60, deadline=None)
@given(cuts(), st.data())
def test_stored_shards_cover_each_element_once(given_cut: Cut, data: Any) -> None:
    shape, cut = given_cut
    whole = torch.arange(1.0, prod(shape) + 1).reshape(shape)
    stored = StoredCut.of(shape, cut)
    if stored is not None:
        stored.check(shape)
    flat = stored_by_definition(whole, stored)
    assert flat.numel() == whole.numel()
    seen = torch.zeros_like(flat)
    for rank in range(cut.ranks):
        part = Part(torch.Size(shape), cut, rank)
        local = part.of(whole).reshape(-1)
        bounds = sorted(data.draw(st.lists(st.integers(0, local.numel()), max_size=3)))
        for start, end in zip([0, *bounds], [*bounds, local.numel()], strict=True):  # for any boundaries of the shards
            for run in own_runs(part, start, end):
                assert start <= run.local and run.local + run.numel <= end and run.numel > 0
                there = slice(run.stored, run.stored + run.numel)
                assert torch.equal(flat[there], local[run.local : run.local + run.numel])
                seen[there] += 1
            known = torch.zeros(end - start)
            for run in full_runs(part, start, end):  # including elements that other ranks store
                known[run.local - start : run.local - start + run.numel] = whole.view(-1)[run.stored :][: run.numel]
            assert torch.equal(known, local[start:end])
    assert bool((seen == 1).all())


@settings(max_examples=60, deadline=None)
@given(cuts(), cuts(), st.data(), st.integers(1, 40), st.sampled_from([2, 1 << 15]))
def test_read_ranges_of_tensors_and_shards(written: Cut, here: Cut, data: Any, block: int, wide: int) -> None:
    """Read ranges of a tensor that is stored under one spec, and of its shards under the same, another or no spec."""
    (shape, cut), (other_shape, other) = written, here
    whole = torch.randn(shape)
    stored = StoredCut.of(shape, cut)
    flat = stored_by_definition(whole, stored)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(order, "BLOCK_NUMEL", block)
        patched.setattr(order, "WIDE_NUMEL", wide)
        order._Columns.of.cache_clear()
        start = data.draw(st.integers(0, whole.numel()))
        out = torch.full((data.draw(st.integers(0, whole.numel() - start)),), float("nan"))
        read_logical(reader(flat), shape, stored, start, out)
        assert torch.equal(out, whole.reshape(-1)[start : start + out.numel()])
        fits = [(each, stored) for each in (cut, *([other] if other_shape == shape else ()))]
        for each, lying in (*fits, (cut, None)):
            for rank in range(each.ranks):
                part = Part(torch.Size(shape), each, rank)
                expected = part.of(whole).reshape(-1)
                start = data.draw(st.integers(0, expected.numel()))
                out = torch.full((data.draw(st.integers(0, expected.numel() - start)),), float("nan"))
                read_part(reader(stored_by_definition(whole, lying)), lying, part, start, out)
                assert torch.equal(out, expected[start : start + out.numel()])
    order._Columns.of.cache_clear()


def test_invalid_stored_cut() -> None:
    for dim, ranges, said in (
        (2, (((0, 4),),), "dim 2"),
        (-1, (((0, 4),),), "dim -1"),
        (1, (((0, 3),),), "a cut of 3 in dim 1"),
        (1, (((0, 2),), ((1, 4),)), r"\(1, 4\) where 2"),
        (1, (((0, 2),), ((3, 4),)), r"\(3, 4\) where 2"),
        (1, (((0, 4),), ((4, 4),)), r"\(4, 4\) where 4"),
        (1, (((0, 6), (4, 4)),), r"\(4, 4\) where 6"),
    ):
        raises(ValueError, said, StoredCut(dim, ranges).check, (3, 4))


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_shares_add_up_and_are_even(units: int, ranks: int, unit: int) -> None:
    found = shares(units * unit, ranks, unit)
    assert sum(found) == units * unit and len(found) == ranks
    assert all(size % unit == 0 for size in found) and max(found) - min(found) <= unit
    assert found == sorted(found, reverse=True)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(0, 1))
def test_unshard_restores_the_tensor(blocks: list[list[int]], dim: int) -> None:
    cut = ShardSpec.of_sizes(dim, blocks)
    shape = (cut.size, 2) if dim == 0 else (2, cut.size)
    whole = torch.arange(2.0 * cut.size).view(shape)
    parts = [cut.part(whole, rank) for rank in range(3)]
    assert [part.shape[dim] for part in parts] == [cut.numel(rank) for rank in range(3)]
    assert torch.equal(cut.unshard(parts), whole) and not cut.holders()


def test_fused_matrices_are_sharded_separately() -> None:
    cut = ShardSpec.even(0, 12, 2, blocks=3, unit=2)
    assert cut.ranges == (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))


def test_replicated_ranges() -> None:
    """Two key heads of size 2 are replicated over four ranks."""
    cut = ShardSpec(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))
    whole = torch.arange(4.0)
    assert cut.part(whole, 1).tolist() == [0, 1]
    assert torch.equal(cut.unshard([whole[:2], whole[:2], whole[2:], whole[2:]]), whole)
    assert cut.holders() == {(0, 2): (0, 1), (2, 4): (2, 3)}


def test_invalid_shard_spec() -> None:
    raises(ValueError, "6 attention heads do not divide into groups for 4 key/value heads", Heads.over, 6, 4, 2)
    raises(ValueError, "no rank holds element 2 of 4", lambda: ShardSpec(0, 4, (((0, 2),), ((3, 4),))))
    raises(ValueError, r"rank 1 holds \(2, 5\) of 4", lambda: ShardSpec(0, 4, (((0, 2),), ((2, 5),))))
    raises(ValueError, "10 elements do not divide into units of 4", lambda: shares(10, 2, 4))
    raises(ValueError, "10 elements do not divide into 3 blocks of units of 1", ShardSpec.even, 0, 10, 2, blocks=3)
    raises(ValueError, r"\(3, 2\) has 3 in dim 0, not 4", lambda: ShardSpec.even(0, 4, 2).part(torch.ones(3, 2), 0))


CPU = torch.device("cpu")
RATES = ((SimpleNamespace(p=0.5), "p"),)


class Philox:
    """The part of a CUDA generator that is used: its seed and offset."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.seed, self.offset = 11, 8

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**63
        self.seed, self.offset = seed, 0

    def state(self) -> tuple[int, int]:
        return self.seed, self.offset


def test_cuda_generator_continues_after_the_region() -> None:
    seeds: dict[int, list[int]] = {}
    for rank in range(4):
        generator, private = Philox(), RankRng(rank)
        with mock.patch("shardwise.core.base.rng.default_generator", lambda _, found=generator: found):
            for behind in ((11, 12), (11, 16)):
                private.enter(generator.device, RATES)
                assert private.inside and generator.offset == 0
                seeds.setdefault(rank, []).append(generator.seed)
                generator.set_offset(40)  # dropout draws
                with private.drawing(False, generator.device, RATES):
                    assert generator.state() == behind
                assert generator.offset == 40 and generator.seed == seeds[rank][-1]
                private.leave()
                assert generator.state() == behind and not private.inside
    drawn = [seed for each in seeds.values() for seed in each]
    assert len(set(drawn)) == len(drawn) == 8


def numbers(private: RankRng) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers drawn inside and after the sharded region, from one initial state."""
    torch.manual_seed(3)
    private.enter(CPU, RATES)
    inside = torch.rand(5)
    private.leave()
    return inside, torch.rand(5)


def test_random_numbers_differ_inside_and_agree_after_the_region() -> None:
    with torch.random.fork_rng(devices=[]):
        inside, behind = zip(*(numbers(RankRng(rank)) for rank in range(3)), strict=True)
        once_more = numbers(RankRng(1))
    assert len({tuple(each.tolist()) for each in (*inside, behind[0])}) == 4
    assert all(torch.equal(each, behind[0]) for each in behind)
    assert torch.equal(once_more[0], inside[1])


def test_replicated_draws_do_not_change_the_draws_of_a_rank() -> None:
    def draws(common: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        private = RankRng(1)
        private.enter(CPU, RATES)
        found = [torch.rand(3)]
        if common:
            with private.drawing(False, CPU, RATES):
                found.append(torch.rand(3))
        found.append(torch.rand(3))
        private.leave()
        return [*found, torch.rand(3)]

    with torch.random.fork_rng(devices=[]):
        with_common, without = draws(True), draws(False)
    own, shared, more, behind = with_common
    assert torch.equal(own, without[0]) and torch.equal(more, without[1])
    assert torch.equal(shared, without[2]) and not torch.equal(behind, without[2])
