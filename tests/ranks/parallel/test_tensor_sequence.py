"""Sequences of which each rank has some tokens between cut layers: engines, dropout, memory, refusals.

Every architecture is compared in ``test_tensor_architectures.py``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardwise.core.parallel.tensor import Axis, cut_model
from shardwise.plan import Plan, TensorPlan
from shardwise.testing import assert_close, run_ranks
from tests.recipes.tensor_architecture import ARCHITECTURE, Mini
from tests.support.engine_setup import PLANS, sharded
from tests.support.hybrid_setup import MAX_NORM, Steps, Texts, made, optimizer_of, plain_steps
from tests.support.scope import Scope
from tests.support.sets import full
from tests.support.tensor_cases import CASES, adapted, decoder, language
from tests.support.tensor_setup import Case, compare, cut, run, whole

Mode = Literal["split_gather"]
BATCH, RATE = 3, 0.4


@contextmanager
def axis_of() -> Iterator[Axis]:
    """Over all ranks."""
    with Scope("shared") as group:
        yield Axis(group)


def plan_of(mode: Mode | None = "split_gather", **changes: Any) -> TensorPlan:
    return TensorPlan(vocabulary_multiple=4, sequence=mode, **changes)


# ---- engines


def trained(plan: Plan, checkpointed: bool, expected: Steps) -> None:
    """Three steps with clipping, sequences of seven tokens, some of them padding."""
    model = made("llama", tie_word_embeddings=checkpointed)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = plan.but(tp=2, max_norm=MAX_NORM, tensor=plan_of())
    with sharded(model, optimizer_of(model), plan) as session:
        mesh, optimizer = session.mesh, session.optimizer
        texts = Texts(3 * mesh.size * BATCH)
        for step, (loss, norm, values) in enumerate(expected):
            rows = [(step * BATCH + row) * mesh.size + mesh.rank for row in range(BATCH)]
            own = session.module(**{name: torch.stack([texts[row][name] for row in rows]) for name in texts.items}).loss
            session.backward(own)
            mean = sum(post[0] for post in mesh.world.exchange([own.item()])) / mesh.size
            optimizer.step()
            numbers = {"loss": mean, "norm": optimizer.get_grad_norm()}
            wide = [
                {key: torch.tensor(value, dtype=torch.float64) for key, value in each.items()}
                for each in (numbers, {"loss": loss, "norm": norm})
            ]
            assert_close(*wide, 1e-10, f"step {step}")
            facts = session.engine.shards.layout.facts
            with session.module.gathered():
                held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
            parts = {f.names[0]: v if f.part is None else f.part.of(v) for f in facts for v in (values[f.names[0]],)}
            assert_close(held, parts, 1e-9, f"parameters after step {step}")


@pytest.mark.parametrize(
    ("name", "checkpointed"), [("zero1", False), ("zero3", True), *full(("zero3", False), ("zero1", True))]
)
def test_training_equals_plain_pytorch(name: str, checkpointed: bool) -> None:
    expected = plain_steps("llama", 2, BATCH, True, tie_word_embeddings=checkpointed)
    run_ranks(4, trained, PLANS[name], checkpointed, expected)


# ---- random numbers


def differs(axis: Axis, x: Tensor) -> bool:
    found = axis.collect(x)
    return not all(torch.equal(found[0], each) for each in found[1:])


def noisy() -> list[tuple[Case, str]]:
    """Models that draw everywhere, and the name of a dropout between blocks."""
    gpt2 = transformers.GPT2Config(
        n_embd=24, n_head=4, n_layer=2, n_positions=16, vocab_size=29, attn_pdrop=RATE, resid_pdrop=RATE,
        embd_pdrop=RATE, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    rates = {"hidden_dropout_prob": RATE, "attention_probs_dropout_prob": RATE}
    moe = {"num_local_experts": 4, "router_jitter_noise": 0.1, "attention_dropout": RATE}
    return [
        (Case("GPT2LMHeadModel", gpt2, language), "transformer.h.1.mlp.dropout"),
        (Case("BertForMaskedLM", decoder("Bert", **rates), language), "bert.encoder.layer.1.output.dropout"),
        (Case("MixtralForCausalLM", decoder("Mixtral", experts_implementation="eager", **moe), language), ""),
        (adapted(RATE)[0], ""),
    ]


def drawn() -> None:
    """Each rank drops other elements of its own tokens, a recomputation drops the same once more, and behind the layers
    all draw alike."""
    with axis_of() as axis:
        for case, name in noisy():
            model = case.made()
            tp_plan = cut(model, axis, plan_of())
            dropped: list[Tensor] = []
            if name:
                model.get_submodule(name).register_forward_hook(
                    lambda _, __, y, found=dropped: found.append((y == 0).double())
                )
            found: list[dict[str, Tensor]] = []
            for reentrant in (None, False, True):
                if reentrant is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
                torch.manual_seed(7)
                model.zero_grad()
                loss = model(**case.batch()).loss
                loss.backward()
                grads = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
                assert not differs(axis, loss.detach()), "the ranks do not have the same loss"
                assert not tp_plan.private.inside and not differs(axis, torch.get_rng_state().double())
                whole(model, axis, grads)
                found.append({key: grad.clone() for key, grad in grads.items()})
            assert not name or (differs(axis, dropped[0]) and bool(dropped[0].any()))
            for others in found[1:]:
                assert others.keys() == found[0].keys()
                assert all(torch.equal(others[key], grad) for key, grad in found[0].items())


def test_a_rank_drops_its_own_of_its_tokens() -> None:
    run_ranks(2, drawn)


# ---- what is held and sent


def kept(mode: Mode | None, length: int) -> tuple[int, int]:
    """Bytes that layers get from each other and their norms save for the backward pass, and those of whole tokens."""
    config = decoder("Llama", hidden_size=24, num_hidden_layers=3)
    case = Case("LlamaForCausalLM", config, language)
    with axis_of() as axis:
        model = case.made()
        cut(model, axis, plan_of(mode))
        between = 0

        def count(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            nonlocal between
            between += given[0].nbytes

        for layer in model.model.layers:
            layer.register_forward_pre_hook(count)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_pre_hook(count)
        ids = torch.randint(0, 27, (2, length))
        logits = model(input_ids=ids).logits
        assert logits.shape[:2] == (2, length)
        return between, 3 * 3 * 2 * length * 24 * 8


@pytest.mark.parametrize(("ranks", "length"), [(2, 7), *full((2, 8), (4, 8), (4, 6))])
def test_tokens_between_layers_are_divided_by_the_ranks(ranks: int, length: int) -> None:
    for mode in (None, "split_gather"):
        found = run_ranks(ranks, kept, mode, length)
        shares = [(length + ranks - 1 - rank) // ranks for rank in range(ranks)] if mode else [length] * ranks
        assert [between for between, _ in found] == [
            whole * n // length for n, (_, whole) in zip(shares, found, strict=True)
        ]


# ---- what is refused, and what goes on as it was


def refused() -> list[str]:
    """What is asked of the model's states is told in the pass; the rest before anything changes."""
    told = []
    with axis_of() as axis:
        case = CASES["llama"]()[0]
        model = case.made()
        tp_plan = cut(model, axis, plan_of())
        with pytest.raises(ValueError) as error:
            model(**case.batch(), output_hidden_states=True)
        told.append(str(error.value))
        with pytest.raises(RuntimeError) as failed:
            model.model.layers[0].mlp(torch.zeros(2, 3, 24).double())
        told.append(str(failed.value))
        assert run(case, model, case.batch())[0].isfinite()
        tp_plan.remove()
        assert type(model.model.layers[0]) is transformers.models.llama.modeling_llama.LlamaDecoderLayer
        assert type(model.model) is transformers.LlamaModel
        changes: list[tuple[str, dict[str, Any]]] = [
            ("OPT", {"layerdrop": 0.1}),
            ("Bert", {"chunk_size_feed_forward": 2}),
        ]
        for name, each in changes:
            kind = {"OPT": transformers.OPTForCausalLM, "Bert": transformers.BertForMaskedLM}[name]
            with pytest.raises(ValueError) as error:
                cut_model(kind(decoder(name, **each)), axis, plan_of())
            told.append(str(error.value))
    return told


def test_what_divided_sequences_cannot_do_is_told() -> None:
    for told in run_ranks(2, refused):
        for words, found in zip(
            ("output_hidden_states=True", "call the whole model", "give layerdrop=0", "give chunk_size_feed_forward=0"),
            told,
            strict=True,
        ):
            assert re.search(words, found), found


def generated() -> None:
    """With a cache: one token at a time, which one rank has."""
    case = CASES["llama"]()[1]
    ids = torch.randint(3, 27, (2, 5), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 27}
    with axis_of() as axis:
        whole_one, model = case.made().eval(), case.made().eval()
        cut(model, axis, plan_of())
        expected = whole_one.generate(ids, **options)  # type: ignore[operator]
        assert torch.equal(model.generate(ids, **options), expected)  # type: ignore[operator]


def test_a_model_with_divided_sequences_generates_what_the_whole_one_does() -> None:
    run_ranks(2, generated)


def beside_tables() -> None:
    """Adapters, and a model of one's own: attention and MLP in one layer, layers in an ``nn.Sequential``."""
    with axis_of() as axis:
        for case in adapted():
            compare(case, axis, plan_of())
        torch.manual_seed(0)
        plain_one = Mini().double()
        model = copy.deepcopy(plain_one)
        cut(model, axis, plan_of(architecture=ARCHITECTURE))
        ids = torch.randint(0, 29, (2, 5), generator=torch.Generator().manual_seed(1))
        for each in (plain_one, model):
            nn.functional.cross_entropy(each(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        expected = {name: param.grad for name, param in plain_one.named_parameters() if param.grad is not None}
        assert_close(whole(model, axis, grads), expected, 1e-11, "gradients", floor=1e-2)


def test_adapters_and_models_of_ones_own() -> None:
    run_ranks(2, beside_tables)
