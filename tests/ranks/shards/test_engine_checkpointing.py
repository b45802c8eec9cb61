"""Hugging Face models: activation checkpointing of both kinds, and generation."""

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import zero
from tests.support.engine_setup import adam, check, plain_steps, sharded
from tests.support.on_ranks import on_ranks
from tests.support.sets import full
from tests.support.steps import take_steps

STEPS = 2


WRITE = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def causal_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
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


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(tokens_of(rank, step), labels=tokens_of(rank, step)).loss  # type: ignore[no-any-return]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("reentrant", "shared"), [(False, False), *full((True, None))])
@on_ranks(2, timeout=150.0)
def test_hugging_face_checkpointing_and_generation(reentrant: bool, shared: bool | None) -> None:
    plain, model, plan = causal_model(), causal_model(), zero(3).but(shared_memory=shared)
    expected = plain_steps(plain, adam(plain, 1e-2), STEPS, loss_of)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with sharded(model, adam(model, 1e-2), plan) as session:
        session.module.train()
        take_steps(session, range(STEPS), loss_of)
        check([session.module.state_dict()], expected, "llama", rtol=1e-5)
        session.module.eval()
        chunks = session._engine.shards.layout.chunks
        whole = sum(c.padded_bytes for c in chunks) // session.mesh.size * (session.mesh.size - 1)
        for _ in range(2):
            session.reset_traffic()
            with session.module.gathered(), torch.no_grad():
                for _ in range(2):
                    written = session.module.generate(tokens_of(0, 9), **WRITE)
            # Each unit is gathered once per gathered(), for any number of forwards inside.
            assert session.traffic()["all_gather"] == whole
            assert torch.equal(written, plain.eval().generate(tokens_of(0, 9), **WRITE))
