"""The unsharded oracle against torch's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.models import MODELS, make_batches

# DDP itself cannot do these: reentrant checkpoints with unused-parameter search.
DDP_CASES = [name for name in MODELS if name not in ("checkpointed_reentrant",)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train_with_ddp(name: str, max_norm: float, norm_type: float) -> list[tuple[list[float], dict[str, Tensor]]]:
    case = MODELS[name]
    batches = make_batches(case, dist.get_world_size(), steps=2, micro_batches=2, dtype=torch.float64)
    model = case.factory(torch.float64)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adam(model)
    record = []
    for step in batches:
        for micro in step:
            case.loss(wrapped, micro[dist.get_rank()]).backward()
        graded = [p for p in model.parameters() if p.grad is not None and p.numel()]
        norm = torch.nn.utils.clip_grad_norm_(graded, max_norm, norm_type)
        optimizer.step()
        optimizer.zero_grad()
        record.append(([float(norm)], {key: p.detach().clone() for key, p in model.named_parameters()}))
    return record


@pytest.mark.parametrize("name", DDP_CASES)
def test_oracle_equals_ddp(name: str) -> None:
    case = MODELS[name]
    batches = make_batches(case, 2, steps=2, micro_batches=2, dtype=torch.float64)
    recipe = PlainRecipe(max_norm=0.1, norm_type=2.0)
    run = train_plain(lambda: case.factory(torch.float64), case.loss, adam, batches, recipe)
    rtol = 1e-2 if name == "mixed_bf16" else 1e-9
    for step, (norms, parameters) in enumerate(run_ranks(2, train_with_ddp, name, 0.1, 2.0)[0]):
        assert run.norms[step] == pytest.approx(norms[0], rel=rtol)
        assert_close(parameters, run.parameters[step], rtol, f"{name} after step {step}")


def weighted_count(batch: dict[str, Tensor]) -> float:
    return float(batch["target"].ne(0).sum())


def test_token_weights_give_the_mean_over_all_tokens() -> None:
    case = MODELS["mlp"]
    batches = make_batches(case, 2, steps=1, micro_batches=3, dtype=torch.float64)
    for micro, rows in zip(batches[0], (1, 2, 4), strict=True):
        micro[0].update(args=(micro[0]["args"][0][:rows],), target=micro[0]["target"][:rows])
    joined = {
        "args": (torch.cat([batch["args"][0] for micro in batches[0] for batch in micro]),),
        "target": torch.cat([batch["target"] for micro in batches[0] for batch in micro]),
    }

    def factory() -> nn.Module:
        return case.factory(torch.float64)

    run = train_plain(factory, case.loss, adam, batches, PlainRecipe(tokens=weighted_count))
    whole = train_plain(factory, case.loss, adam, [[[joined]]])
    assert_close(run.gradients[0], whole.gradients[0], 1e-12, "token-weighted gradients")


KINDS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}


@pytest.mark.parametrize("kind", KINDS)
def test_without_masters_it_is_training_of_the_cast_model(kind: str) -> None:
    """Written out for two ranks: the model in bf16, gradients summed in fp32 and rounded once, a step in bf16."""
    case = MODELS["mlp"]
    batches = make_batches(case, 2, steps=3)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return KINDS[kind](model.parameters(), lr=0.02)

    model = case.factory().bfloat16()
    own = optimizer(model)
    for step in batches:
        by_rank = []
        for batch in step[0]:
            output = model(batch["args"][0].bfloat16())
            loss = (output.float() - batch["target"]).square().mean()
            by_rank.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, first, second in zip(model.parameters(), *by_rank, strict=True):
            parameter.grad = ((first.float() + second.float()) / 2).bfloat16()
        own.step()
    recipe = PlainRecipe(param_dtype=torch.bfloat16, masters=False)
    run = train_plain(case.factory, case.loss, optimizer, batches, recipe)
    expected = dict(model.named_parameters())
    assert_close(run.parameters[-1], expected, 0.0, kind)
    assert_close(run.masters[-1], expected, 0.0, kind)
    kept = train_plain(case.factory, case.loss, optimizer, batches, replace(recipe, masters=True))
    assert kept.masters[-1].keys() == expected.keys()
    assert any(not torch.equal(kept.parameters[-1][name], value) for name, value in expected.items())
