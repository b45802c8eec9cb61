"""Which ranks accelerate knows of, and under which device's name, by the variables of a launcher."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.plan import zero
from shardwise.testing import run_ranks
from tests.support.huggingface_setup import launched
from tests.support.on_ranks import on_ranks

pytest.importorskip("accelerate")


def step(accelerator: Any) -> float:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    weight: float = accelerator.get_state_dict(model)["weight"].sum().item() if accelerator.is_main_process else 1.0
    accelerator.close()
    return weight


def one_of_a_launcher() -> tuple[str, float]:
    from shardwise.huggingface import ShardwiseAccelerator

    with launched():
        told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        os.environ.update(told, OMP_NUM_THREADS="1")
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        accelerator = ShardwiseAccelerator(plan=zero(2), cpu=True)
        return str(accelerator.device), step(accelerator)


def test_one_rank_of_a_launcher_trains() -> None:
    """accelerate calls its CPU ``cpu:0``, which no tensor says of its own."""
    assert run_ranks(1, one_of_a_launcher) == [("cpu:0", 1.0)]


@on_ranks(2)
def test_ranks_that_accelerate_does_not_know_of_are_an_error() -> None:
    from shardwise.huggingface import ShardwiseAccelerator

    errors = []
    with launched():
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
        with pytest.raises(RuntimeError) as error:
            ShardwiseAccelerator(plan=zero(2), cpu=True)
        errors.append(str(error.value))
    assert "torch.distributed has 2 ranks, but accelerate knows of 1" in errors[0]
    assert "LOCAL_RANK" in errors[0]
