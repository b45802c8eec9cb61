"""LoRA on packed experts (peft's ``target_parameters``), which puts a parametrization around each forward pass."""

from __future__ import annotations

import copy
import tempfile
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shardwise.plan import Plan
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, sharded
from tests.support.sets import full

STEPS = 2


Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Losses, the last gradients, the state, and the weights with the adapter merged into them."""


def base() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config)


def adapted() -> nn.Module:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base(), LoraConfig(r=2, target_modules=[], target_parameters=experts, lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.02)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=ids, labels=ids).loss


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained_plainly() -> Result:
    model = adapted()
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        loss = sum(loss_of(model, rank, step) for rank in range(2)) / 2
        loss.backward()
        losses.append(float(loss.detach()))
        grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, grads, state, merged(model)


def merged(model: nn.Module) -> dict[str, Tensor]:
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


def trained(plan: Plan) -> Result:
    model, losses = adapted(), []
    with sharded(model, optimizer_of(model), plan) as session:
        for step in range(STEPS):
            loss = loss_of(session.module, session.mesh.rank, step)
            session.backward(loss)
            grads = grads_of(model)
            session.optimizer.step()
            session.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        state = session.module.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            with session.module.gathered():
                model.save_pretrained(folder)
            return losses, grads, state, merged(PeftModel.from_pretrained(base(), folder))


@pytest.mark.parametrize("name", full("zero2", "zero3", "zero3_tensor", "zero3_gloo"))
def test_adapters_of_experts_train_as_plainly(name: str) -> None:
    losses, grads, state, whole = trained_plainly()
    results = run_ranks(2, trained, PLANS[name])
    for step in range(STEPS):
        assert abs(sum(found[step] for found, *_ in results) / 2 - losses[step]) < 1e-5
    for _, found_grads, found, found_whole in results:
        assert_close(found_grads, grads, 1e-4, f"{name}, gradients")
        assert_close(found, state, 1e-4, name)
        assert_close(found_whole, whole, 1e-4, f"{name}, exported and merged")
