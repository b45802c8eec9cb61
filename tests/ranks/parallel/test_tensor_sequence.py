"""Sequences of which each rank has some tokens between cut layers: engines, memory, refusals.

Every architecture is compared in ``test_tensor_architectures.py``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import nn

from shardwise.core.parallel.tensor import Axis, cut_model
from shardwise.plan import Plan, TensorPlan
from shardwise.testing import assert_close, run_ranks
from tests.recipes.tensor_architecture import ARCHITECTURE, Mini
from tests.support.engine_setup import PLANS, sharded
from tests.support.hybrid_setup import MAX_NORM, Steps, Texts, made, optimizer_of, plain_steps
from tests.support.on_ranks import on_ranks, raises
from tests.support.scope import Scope
from tests.support.sets import full
from tests.support.step_checks import assert_numbers, assert_parts
from tests.support.tensor_cases import CASES, decoder, language
from tests.support.tensor_setup import Case, cut, run, whole

Mode = Literal["split_gather"]
BATCH = 3


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
            assert_numbers(numbers, {"loss": loss, "norm": norm}, 1e-10, f"step {step}")
            assert_parts(session, values, f"parameters after step {step}")


@pytest.mark.parametrize(
    ("name", "checkpointed"), [("zero1", False), ("zero3", True), *full(("zero3", False), ("zero1", True))]
)
def test_training_equals_plain_pytorch(name: str, checkpointed: bool) -> None:
    expected = plain_steps("llama", 2, BATCH, True, tie_word_embeddings=checkpointed)
    run_ranks(4, trained, PLANS[name], checkpointed, expected)


# ---- what is held and sent


@on_ranks()
@pytest.mark.parametrize(("ranks", "length"), [(2, 7), *full((2, 8), (4, 8), (4, 6))])
@pytest.mark.parametrize("mode", [None, "split_gather"])
def test_tokens_between_layers_are_divided_by_the_ranks(ranks: int, length: int, mode: Mode | None) -> None:
    """Bytes that layers get from each other and their norms save for the backward pass."""
    case = Case("LlamaForCausalLM", decoder("Llama", hidden_size=24, num_hidden_layers=3), language)
    with axis_of() as axis:
        model = case.made()
        cut(model, axis, plan_of(mode))
        between: list[int] = []
        for layer in model.model.layers:
            for each in (layer, layer.input_layernorm, layer.post_attention_layernorm):
                each.register_forward_pre_hook(lambda _, given: between.append(given[0].nbytes))
        logits = model(input_ids=torch.randint(0, 27, (2, length))).logits
        assert logits.shape[:2] == (2, length)
        tokens = (length + ranks - 1 - axis.rank) // ranks if mode else length
        assert sum(between) == 3 * 3 * 2 * tokens * 24 * 8


# ---- what is refused, and what goes on as it was


@on_ranks(2)
def test_what_divided_sequences_cannot_do_is_told() -> None:
    """What is asked of the model's states is told in the pass; the rest before anything changes."""
    with axis_of() as axis:
        case = CASES["llama"]()[0]
        model = case.made()
        tp_plan = cut(model, axis, plan_of())
        raises(ValueError, "output_hidden_states=True", lambda: model(**case.batch(), output_hidden_states=True))
        raises(RuntimeError, "call the whole model", model.model.layers[0].mlp, torch.zeros(2, 3, 24).double())
        assert run(case, model, case.batch())[0].isfinite()
        tp_plan.remove()
        assert type(model.model.layers[0]) is transformers.models.llama.modeling_llama.LlamaDecoderLayer
        assert type(model.model) is transformers.LlamaModel
        opt = transformers.OPTForCausalLM(decoder("OPT", layerdrop=0.1))
        bert = transformers.BertForMaskedLM(decoder("Bert", chunk_size_feed_forward=2))
        raises(ValueError, "give layerdrop=0", cut_model, opt, axis, plan_of())
        raises(ValueError, "give chunk_size_feed_forward=0", cut_model, bert, axis, plan_of())


@on_ranks(2)
def test_a_model_of_ones_own() -> None:
    """Attention and MLP in one layer, layers in an ``nn.Sequential``."""
    with axis_of() as axis:
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
