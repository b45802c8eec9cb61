"""The unsharded oracle against torch's DistributedDataParallel, and its two paths against each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.models import MODELS, make_batches
from tests.support.sets import full

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


def in_turn(name_of_case: str, *values: Any) -> list[Any]:
    """Each model with one of the values; with the others in the full set."""
    found: list[Any] = []
    for index, name in enumerate(sorted(MODELS)):
        for at, value in enumerate(values):
            row = pytest.param(name, value, id=name_of_case.format(name=name, value=value, at=at))
            found += [row] if index % len(values) == at else full(row)
    return found


@pytest.mark.parametrize(("name", "norm_type"), in_turn("{value}-{name}", 2.0, math.inf))
def test_both_paths_agree_where_both_apply(name: str, norm_type: float) -> None:
    case = MODELS[name]
    batches = make_batches(case, 3, steps=2, micro_batches=2)
    plain = PlainRecipe(max_norm=0.05, norm_type=norm_type, mean_over_micro_batches=True)
    scaled = PlainRecipe(max_norm=0.05, norm_type=norm_type, mean_over_micro_batches=True, loss_scale=1024.0)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    a, b = (train_plain(case.factory, case.loss, sgd, batches, recipe) for recipe in (plain, scaled))
    for step in range(2):
        rtol = 2e-2 if name == "mixed_bf16" else 1e-5
        assert_close(b.gradients[step], a.gradients[step], rtol, f"gradients {step}", floor=1e-6)
        assert_close(b.masters[step], a.masters[step], 1e-4, f"parameters {step}")


@pytest.mark.parametrize(("name", "dtype"), in_turn("{name}-dtype{at}", torch.bfloat16, torch.float16))
def test_half_precision_stays_near_fp32(name: str, dtype: torch.dtype) -> None:
    case = MODELS[name]
    batches = make_batches(case, 2, steps=3, micro_batches=2)
    scale = 1024.0 if dtype is torch.float16 else 1.0
    half = PlainRecipe(param_dtype=dtype, buffer_dtype=dtype, max_norm=1.0, loss_scale=scale)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    run = train_plain(case.factory, case.loss, sgd, batches, half)
    near = train_plain(case.factory, case.loss, sgd, batches, PlainRecipe(max_norm=1.0))
    assert not any(run.skipped)
    assert {p.dtype for p in run.model.parameters()} == {dtype}
    for step in range(3):
        assert run.norms[step] == pytest.approx(near.norms[step], rel=0.1)
        assert_close(run.masters[step], near.masters[step], 0.05, f"step {step}", floor=0.1, check_dtype=False)


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


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_kernels_are_right_in_16_bits(kind: type[torch.optim.Optimizer]) -> None:
    """Those that the engine takes on a CPU, and the parity tests with it: of any length, against fp32 arithmetic.

    One unit in the last place (2^-7) for each of three steps: a step rounds the values and the state once each.
    """
    for numel in (1, 7, 8, 15, 16, 17, 31, 33, 64, 100):
        generator = torch.Generator().manual_seed(numel)
        start, *gradients = torch.randn(4, numel, generator=generator).bfloat16()
        narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
        for parameter, how in ((narrow, {"fused": True}), (wide, {"foreach": False})):
            optimizer = kind([parameter], lr=0.05, weight_decay=0.1, **how)
            for gradient in gradients:
                parameter.grad = gradient.to(parameter.dtype)
                optimizer.step()
        assert_close({"p": narrow.float()}, {"p": wide}, 3 * 2.0**-7, f"{kind.__name__} of {numel}")
