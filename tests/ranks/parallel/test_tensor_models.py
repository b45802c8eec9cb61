"""Tensor parallelism of transformers models: architectures, dropout, activation checkpointing, generation and adapters.

Models of every architecture with every head equal the unsplit models in fp64, with full and with split sequences.
Quick: the first head of every architecture on two ranks. Full: every head, on two or four. Campaign: on both. Layers
that cannot be split are named, and sums and gathers of activations take few operations.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardwise.core.parallel.tensor import (
    Axis,
    ShardSpec,
    TPPlan,
    cut_model,
    propose_architecture,
    vocabulary_cross_entropy,
)
from shardwise.plan import TensorPlan
from shardwise.testing import assert_close
from tests.ranks.engine.test_engine_compile import Kernels
from tests.recipes.tensor_architecture import ARCHITECTURE, Mini
from tests.support.on_ranks import assert_refused, on_ranks, raises
from tests.support.scope import Scope
from tests.support.sets import campaign, full
from tests.support.tensor_cases import CASES, adapted, decoder, language
from tests.support.tensor_setup import LENGTH, PAD, ROWS, VOCABULARY, Case, compare, cut, run, whole

PLAN = TensorPlan(vocabulary_multiple=4)
DIVIDED = replace(PLAN, sequence="split_gather")
RATE = 0.4


def dropping() -> list[tuple[Case, str]]:
    """Return models with dropout everywhere, and the name of a layer whose input has the dropout of a rank's own
    part."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_labels": 3, "use_cache": False}
    sizes |= {"pad_token_id": PAD, "eos_token_id": 2, "bos_token_id": 1, "decoder_start_token_id": 0}
    t5 = {"d_model": 24, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": RATE}
    gpt2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 16}
    rates = {"attn_pdrop": RATE, "resid_pdrop": RATE, "embd_pdrop": RATE}
    gated = transformers.T5Config(**t5, feed_forward_proj="gated-gelu", **sizes)
    whole_ones = transformers.GPT2Config(**gpt2, **rates, **sizes)
    return [
        (Case("T5ForConditionalGeneration", gated, language), "decoder.block.1.layer.2.DenseReluDense.wo"),
        (Case("GPT2LMHeadModel", whole_ones, language), "transformer.h.1.attn.c_proj"),
    ]


def differs(axis: Axis, x: Tensor) -> bool:
    found = axis.collect(x)
    return not all(torch.equal(found[0], each) for each in found[1:])


def same_generator(axis: Axis) -> bool:
    return not differs(axis, torch.get_rng_state().double())


@on_ranks(2)
@pytest.mark.parametrize("number", range(2), ids=["t5", "gpt2"])
def test_dropout_differs_within_parts_and_is_equal_between_them(number: int) -> None:
    case, name = dropping()[number]
    with Scope("shared") as group:
        axis, model = Axis(group), case.made()
        with torch.no_grad():  # the parts of both ranks are equal before dropout
            for module in model.modules():
                if isinstance(module, (nn.Linear, transformers.pytorch_utils.Conv1D)):
                    for param in module.parameters():
                        param.fill_(0.1)
        cut(model, axis, PLAN)
        inputs: list[Tensor] = []
        model.get_submodule(name).register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
        torch.manual_seed(7)
        loss, grads = run(case, model, case.batch())
        assert differs(axis, inputs[0]), "the ranks drop the same of their parts"
        assert not differs(axis, loss), "the ranks drop differently of what they hold alike"
        whole(model, axis, grads)
        assert same_generator(axis)
        model.eval()
        inputs.clear()
        before = torch.get_rng_state()
        run(case, model, case.batch())
        assert not differs(axis, inputs[0]) and torch.equal(torch.get_rng_state(), before)


def noisy() -> list[tuple[Case, TensorPlan, str]]:
    """Return models with much randomness, their plans, and the name of a dropout on a rank's own tokens."""
    rates = {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE}
    moe = {"num_local_experts": 4, "router_jitter_noise": 0.1, "attention_dropout": RATE}
    gpt2 = dropping()[1][0]
    return [
        (gpt2, PLAN, ""),
        (gpt2, DIVIDED, "transformer.h.1.mlp.dropout"),
        (Case("BertForMaskedLM", decoder("Bert", **rates), language), DIVIDED, "bert.encoder.layer.1.output.dropout"),
        (Case("MixtralForCausalLM", decoder("Mixtral", experts_implementation="eager", **moe), language), DIVIDED, ""),
        (adapted(RATE)[0], DIVIDED, ""),
    ]


@on_ranks(2)
def test_activation_checkpointing_repeats_dropout() -> None:
    """Gradients equal those without checkpointing bit for bit.

    With split sequences each rank drops other elements of its own tokens, and after the layers all ranks have the same
    random numbers.
    """
    with Scope("shared") as group:
        axis = Axis(group)
        for case, plan, name in noisy():
            model = case.made()
            tp_plan = cut(model, axis, plan)
            dropped: list[Tensor] = []
            if name:
                model.get_submodule(name).register_forward_hook(
                    lambda _, __, y, found=dropped: found.append((y == 0).double())
                )
            first: dict[str, Tensor] = {}
            for reentrant in (None, False, True):
                if reentrant is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
                torch.manual_seed(7)
                model.zero_grad()
                loss = model(**case.batch()).loss
                loss.backward()
                grads = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
                assert not differs(axis, loss.detach()), "the ranks do not have the same loss"
                assert not tp_plan.private.inside and same_generator(axis)
                whole(model, axis, grads)
                first = first or {key: grad.clone() for key, grad in grads.items()}
                assert_close(grads, first, 0.0, f"{case.kind}, reentrant={reentrant}")
            assert not name or (differs(axis, dropped[0]) and bool(dropped[0].any()))


# ---- generation


@on_ranks(2)
@pytest.mark.parametrize(
    "plan", [replace(PLAN, parallel_output=False), PLAN, DIVIDED], ids=["whole", "parts", "tokens"]
)
def test_tensor_parallel_model_generates_the_same_tokens(plan: TensorPlan) -> None:
    """Generate with a cache: one token at a time, which one rank has if sequences are split."""
    case = CASES["llama"]()[1]
    ids = torch.randint(3, PAD, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": PAD}
    with Scope("shared") as group:
        axis, plain, model = Axis(group), case.made().eval(), case.made().eval()
        tp_plan = cut(model, axis, plan)
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))  # type: ignore[operator]
        assert model(ids).logits.shape[-1] == (16 if plan.parallel_output else VOCABULARY)
        tp_plan.remove()
        assert "generate" not in vars(model) and "_loss_function" not in vars(model)


# ---- the plan of the model itself


# Granite scales its logits, Glm has an MLP with gathered layers, Olmo2 norms over all heads.
@on_ranks(4)
@pytest.mark.parametrize(("name", "layers"), [*full(("Granite", 7), ("SmolLM3", 7)), ("Glm", 4), ("Olmo2", 3)])
def test_model_is_split_by_its_own_tp_plan(name: str, layers: int) -> None:
    case = Case(f"{name}ForCausalLM", decoder(name, tie_word_embeddings=False), language, padded=True)
    with Scope("shared") as group:
        found = compare(case, Axis(group), replace(PLAN, architecture=propose_architecture(case.made())))
    weights = [each for each in found if each.endswith("weight")]
    assert len(weights) == 2 * layers + 2  # of each of two layers, the embedding and the head


# ---- adapters


@on_ranks()
@pytest.mark.parametrize(("ranks", "parallel"), [(2, True), *full((4, False))])
def test_adapter_is_split_with_its_layer(ranks: int, parallel: bool) -> None:
    """A low-rank adapter; replicated values have equal dropout on all ranks."""
    with Scope("shared") as group:
        axis = Axis(group)
        plan = replace(PLAN, parallel_output=parallel)
        for case in adapted():
            cut_ones = [name for name in compare(case, axis, plan, *[DIVIDED][: ranks == 2]) if "lora_" in name]
            rows = ("o_proj", "down_proj", "c_proj")
            assert all(("lora_A" in name) == any(layer in name for layer in rows) for name in cut_ones)
            assert len(cut_ones) >= 8
        case, model = adapted(RATE)[0], adapted(RATE)[0].made()
        cut(model, axis, plan)
        inputs: dict[str, Tensor] = {}
        attention = "base_model.model.model.layers.1.self_attn"
        for name in ("q_proj", "o_proj"):
            layer = model.get_submodule(f"{attention}.{name}.lora_dropout.default")
            layer.register_forward_hook(lambda _, given, out, name=name: inputs.update({name: (out == 0).double()}))
        torch.manual_seed(7)
        whole(model, axis, run(case, model, case.batch())[1])
        assert not differs(axis, inputs["q_proj"]) and bool(inputs["q_proj"].any())
        if axis.size == 2:  # equal numbers of heads on each rank
            assert differs(axis, inputs["o_proj"])
        assert same_generator(axis)


@on_ranks(2)
def test_layers_that_cannot_be_split_are_named() -> None:
    with Scope("shared") as group:
        axis = Axis(group)
        tp_plan, spec = TPPlan(axis), ShardSpec.even
        shared = nn.Linear(4, 6)
        tp_plan.columns(shared, spec(0, 6, 2))
        scores = torch.ones(3, 5), torch.ones(3).long(), axis, spec(0, 8, 2), 8
        assert_refused(
            (lambda: tp_plan.columns(nn.LayerNorm(4), spec(0, 4, 2)), "a LayerNorm cannot"),
            (lambda: tp_plan.columns(nn.Linear(4, 6), spec(1, 6, 2)), "give dim 0 and 6"),
            (lambda: tp_plan.rows(nn.Linear(4, 6), spec(1, 3, 2)), "give dim 1 and 4"),
            (lambda: tp_plan.columns(nn.Linear(4, 6), spec(0, 6, 3)), "over an axis of 2"),
            (lambda: tp_plan.vocabulary(nn.Embedding(8, 4, max_norm=1.0), spec(0, 8, 2)), "max_norm=1.0"),
            (lambda: tp_plan.vocabulary(nn.Embedding(8, 4), spec(0, 6, 2)), "at least as many rows"),
            (lambda: vocabulary_cross_entropy(*scores), "give logits [..., 4]"),
            (lambda: tp_plan.rows(shared, spec(1, 4, 2)), "is cut as"),
            error=(TypeError, ValueError),
        )


GATHER, SCATTER = "c10d::_allgather_base_", ["c10d::_reduce_scatter_base_", "copy_"]  # gloo itself makes this copy


@on_ranks(3)
def test_collectives_write_into_final_memory() -> None:
    """Sums, gathers and reduce-scatters of activations over the backend's own collectives make no further copies."""
    with Scope("native") as group:
        axis = Axis(group)
        one, two, sizes = torch.ones(1, 6, 4), torch.ones(2, 6, 4), [2] * 3
        for call, value, names in (
            (lambda: axis.total(one), 3, ["clone", "c10d::allreduce_"]),
            (lambda: axis.joined(one[:, :2], 1, sizes), 1, [GATHER]),
            (lambda: axis.joined(two[:, :2], 1, sizes), 1, ["clone", GATHER, "cat"]),
            (lambda: axis.total_part(one, 1, sizes), 3, SCATTER),
            (lambda: axis.total_part(two, 1, sizes), 3, ["stack", *SCATTER]),
        ):
            with Kernels() as kernels:
                result = call()
            assert result.eq(value).all() and not result._is_view()
            assert kernels.names == names


@on_ranks(2, timeout=300.0)
def test_first_head_of_every_architecture_equals_the_unsplit_model() -> None:
    """Full and split sequences alternate."""
    with Scope("shared") as group:
        axis = Axis(group)
        for at, name in enumerate(sorted(CASES)):
            mode = (None, "split_gather")[at // 2 % 2]
            plan = TensorPlan(parallel_output=at % 2 == 0, vocabulary_multiple=4, sequence=mode)
            assert compare(CASES[name]()[0], axis, plan)


def by_turns() -> list[object]:
    """Return each architecture on two or on four ranks; the campaign has the other number."""
    rows: list[object] = []
    for at, name in enumerate(sorted(CASES)):
        for ranks in (2, 4):
            rows += (full if (ranks == 4) == (at % 2 == 1) else campaign)((name, ranks))
    return rows


@on_ranks(timeout=300.0)
@pytest.mark.parametrize(("architecture", "ranks"), by_turns())
def test_tensor_parallel_architecture_equals_the_unsplit_model(architecture: str, ranks: int) -> None:
    """Run all cases; split and gathered logits alternate, and so do full and split sequences."""
    with Scope("shared") as group:
        for at, case in enumerate(CASES[architecture]()):
            plan = TensorPlan(parallel_output=at % 2 == ranks // 4 % 2, vocabulary_multiple=(4, 64)[at % 2])
            divided = [replace(plan, sequence="split_gather")] if at == 0 or at % 2 else []
            assert compare(case, Axis(group), plan, *divided)


# ---- bytes of activations


@on_ranks()
@pytest.mark.parametrize(("ranks", "length"), [(2, 7), *full((2, 8), (4, 8), (4, 6))])
@pytest.mark.parametrize("mode", [None, "split_gather"])
def test_tokens_between_layers_are_split_over_the_ranks(ranks: int, length: int, mode: Any) -> None:
    """Count the bytes that layers receive from each other, and that their norms save for the backward pass."""
    case = Case("LlamaForCausalLM", decoder("Llama", hidden_size=24, num_hidden_layers=3), language)
    with Scope("shared") as group:
        axis = Axis(group)
        model = case.made()
        cut(model, axis, replace(PLAN, sequence=mode))
        between: list[int] = []
        for layer in model.model.layers:
            for each in (layer, layer.input_layernorm, layer.post_attention_layernorm):
                each.register_forward_pre_hook(lambda _, given: between.append(given[0].nbytes))
        logits = model(input_ids=torch.randint(0, 27, (2, length))).logits
        assert logits.shape[:2] == (2, length)
        tokens = (length + ranks - 1 - axis.rank) // ranks if mode else length
        assert sum(between) == 3 * 3 * 2 * tokens * 24 * 8


# ---- refusals, and models that stay as they were


@on_ranks(2)
def test_unsupported_uses_of_split_sequences_are_errors() -> None:
    """A request for hidden states raises in the pass; the other cases raise before anything changes."""
    with Scope("shared") as group:
        axis = Axis(group)
        case = CASES["llama"]()[0]
        model = case.made()
        tp_plan = cut(model, axis, DIVIDED)
        raises(ValueError, "output_hidden_states=True", lambda: model(**case.batch(), output_hidden_states=True))
        raises(RuntimeError, "call the whole model", model.model.layers[0].mlp, torch.zeros(2, 3, 24).double())
        assert run(case, model, case.batch())[0].isfinite()
        tp_plan.remove()
        assert type(model.model.layers[0]) is transformers.models.llama.modeling_llama.LlamaDecoderLayer
        assert type(model.model) is transformers.LlamaModel
        opt = transformers.OPTForCausalLM(decoder("OPT", layerdrop=0.1))
        bert = transformers.BertForMaskedLM(decoder("Bert", chunk_size_feed_forward=2))
        raises(ValueError, "give layerdrop=0", cut_model, opt, axis, DIVIDED)
        raises(ValueError, "give chunk_size_feed_forward=0", cut_model, bert, axis, DIVIDED)


@on_ranks(2)
def test_user_defined_architecture() -> None:
    """A model with attention and MLP in one layer, and its layers in an ``nn.Sequential``."""
    with Scope("shared") as group:
        axis = Axis(group)
        torch.manual_seed(0)
        plain_one = Mini().double()
        model = copy.deepcopy(plain_one)
        cut(model, axis, replace(DIVIDED, architecture=ARCHITECTURE))
        ids = torch.randint(0, 29, (2, 5), generator=torch.Generator().manual_seed(1))
        for each in (plain_one, model):
            nn.functional.cross_entropy(each(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        expected = {name: param.grad for name, param in plain_one.named_parameters() if param.grad is not None}
        assert_close(whole(model, axis, grads), expected, 1e-11, "gradients", floor=1e-2)
