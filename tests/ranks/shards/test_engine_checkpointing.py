"""Activation checkpointing of both kinds around anything, and Hugging Face models with it."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import (
    PLANS,
    adam,
    away_from_zero,
    check,
    data,
    one_mesh,
    plain_steps,
    run_plain,
    run_sharded,
    sharded,
)
from tests.support.sets import full

STEPS = 2


class Nested(nn.Module):
    """Blocks that are checkpointed, and whose inner parts may be so again."""

    def __init__(self, outer: bool | None, inner: bool | None) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(6, 6) for _ in range(2)) for _ in range(3))
        self.last = nn.Linear(6, 6)

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x if self.inner is None else checkpoint(layer, x, use_reentrant=self.inner)

    def block(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = x + torch.tanh(layer(x) if self.inner is None else self.part(layer, x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layers in self.blocks:
            if self.outer is None:
                x = self.block(layers, x)
            else:
                x = checkpoint(self.block, layers, x, use_reentrant=self.outer)
        return self.last(x)


KINDS = [(True, None), (False, None), (None, False), (False, False), (True, True)]


def inside(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    for micro in range(2):
        yield model(data(rank, step, micro).requires_grad_()).square().mean(), False


def around(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    for micro, reentrant in enumerate((True, False)):
        x = data(rank, step, micro).requires_grad_()
        yield checkpoint(model, x, use_reentrant=reentrant).square().mean(), False


def all_kinds(plan: Plan) -> list[dict[str, Tensor]]:
    with one_mesh(plan) as mesh:
        found = [run_sharded(lambda k=kind: Nested(*k), inside, plan, STEPS, mesh) for kind in KINDS]
        found.append(run_sharded(lambda: Nested(None, None), around, plan, STEPS, mesh))
        found.append(run_sharded(lambda: Nested(False, None), around, plan, STEPS, mesh))
        return found


@pytest.mark.parametrize(
    "name",
    [
        *full("zero2", "half"),
        "zero3_gloo",
        *[pytest.param(n, marks=pytest.mark.campaign) for n in ("ddp", "zero3", "zero3_tensor")],
    ],
)
def test_both_kinds_inside_and_around(name: str) -> None:
    expected = run_plain(lambda: Nested(None, None), inside, 2, STEPS)
    results = run_ranks(2, all_kinds, PLANS[name])
    for index in range(len(KINDS) + 2):
        check([result[index] for result in results], expected, f"{name}, kind {index}")


# ---- Hugging Face

WRITE = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def causal_model(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 37, "n_positions": 16}
        config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, eos_token_id=36)
        return away_from_zero(GPT2LMHeadModel(config))
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 37,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=36))  # no vector starts at zero


def tokens_of(rank: int, step: int) -> Tensor:
    return torch.randint(36, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


Generated = tuple[dict[str, Tensor], Tensor, list[dict[str, int]], int]


def hugging_face(plan: Plan, kind: str, reentrant: bool) -> Generated:
    model = causal_model(kind)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with sharded(model, adam(model, 1e-2), plan) as session:
        rank = session.mesh.rank
        session.module.train()
        for step in range(STEPS):
            out = session.module(tokens_of(rank, step), labels=tokens_of(rank, step))
            session.backward(out.loss)
            session.optimizer.step()
        state = session.module.state_dict()
        session.module.eval()
        chunks = session.engine.shards.layout.chunks
        whole = sum(c.padded_bytes for c in chunks) // session.mesh.size * (session.mesh.size - 1)
        traffic = []
        for _ in range(2):
            session.reset_traffic()
            with session.module.gathered(), torch.no_grad():
                for _ in range(2):
                    written = session.module.generate(tokens_of(0, 9), **WRITE)
            traffic.append(session.traffic())
        return state, written, traffic, whole


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("kind", "reentrant", "shared"), [*full(("gpt2", False, None), ("llama", True, None)), ("llama", False, False)]
)
def test_hugging_face_checkpointing_and_generation(kind: str, reentrant: bool, shared: bool | None) -> None:
    model = causal_model(kind)
    loss = lambda model, rank, step: model(tokens_of(rank, step), labels=tokens_of(rank, step)).loss  # noqa: E731
    plain_steps(model, adam(model, 1e-2), STEPS, loss)
    model.eval()
    expected = model.generate(tokens_of(0, 9), **WRITE)
    results = run_ranks(2, hugging_face, zero(3).but(shared_memory=shared), kind, reentrant, timeout=150)
    for state, written, traffic, whole in results:
        check([state], dict(model.state_dict()), kind, rtol=1e-5)
        assert torch.equal(written, expected)
        # Everything once per gathered(), however many forwards run inside it.
        assert [step["all_gather"] for step in traffic] == [whole, whole]
