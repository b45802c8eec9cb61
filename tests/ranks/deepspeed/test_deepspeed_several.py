"""Several engines of one loss, in fp16 too: what each trains is what plain PyTorch trains."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing import assert_close
from tests.support.ds_setup import close, ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

STEPS, RATE, FACTORS = 3, 0.5, (1.0, 0.5)
HALF = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for param in model.parameters():
        param.data = param.data.half().float()
    return model


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def combined(models: list[Any], dtype: torch.dtype, step: int, rank: int) -> Tensor:
    inputs, targets = batch(step, rank)
    losses = [nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets) for model in models]
    return sum((f * loss for f, loss in zip(FACTORS, losses, strict=True)), torch.zeros(()))


def plain(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """SGD on fp32 masters, with the mean of two ranks' gradients of models in ``dtype``."""
    masters = [net(seed) for seed in (1, 2)]
    for step in range(STEPS):
        models = [net(1).to(dtype), net(2).to(dtype)]
        for master, model in zip(masters, models, strict=True):
            model.load_state_dict(master.state_dict())
        for rank in range(2):
            (combined(models, dtype, step, rank) / 2).backward()
        with torch.no_grad():
            for master, model in zip(masters, models, strict=True):
                for weight, param in zip(master.parameters(), model.parameters(), strict=True):
                    weight -= RATE * param.grad.float()  # type: ignore[union-attr]
    return [master.state_dict() for master in masters]


def engines(precision: str, stage: int) -> list[Any]:
    config = ds_config(stage, 4, optimizer=optimizer_block("SGD", lr=RATE), **HALF[precision])
    return [start(net(seed), config) for seed in (1, 2)]


QUICK = [("fp32", 3), ("fp16", 1), ("fp16", 2)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "stage"),
    [*QUICK, *full(*((name, stage) for name in HALF for stage in (1, 2, 3) if (name, stage) not in QUICK))],
)
def test_one_loss_of_several_engines(precision: str, stage: int) -> None:
    made, rank = engines(precision, stage), torch.distributed.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            combined([engine.module for engine in made], DTYPES[precision], step, rank).backward()
            for engine in made:
                engine._backward_epilogue()
                engine.step()
    told = [str(each.message) for each in caught if "of an unscaled loss" in str(each.message)]
    assert len(told) == (2 if precision == "fp16" else 0)  # each engine once
    for engine, want in zip(made, plain(DTYPES[precision]), strict=True):
        rtol = 1e-6 if precision == "fp32" else 2e-3
        assert_close(close(engine), want, rtol=rtol, what=f"{precision}, stage {stage}")
