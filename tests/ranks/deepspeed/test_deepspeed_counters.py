"""What DeepSpeed's engine counts: samples of the passes that a step was made of, whoever says when it is due."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from tests.support.ds_setup import close, ds_config, start
from tests.support.on_ranks import on_ranks

RANKS, MICRO = 2, 3


def started(**changes: Any) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    return start(nn.Linear(4, 2), ds_config(2, MICRO, **changes))


def loss(engine: deepspeed.DeepSpeedEngine) -> Tensor:
    return engine(torch.ones(MICRO, 4)).square().mean()


def counts(engine: deepspeed.DeepSpeedEngine) -> list[float]:
    """Steps, and samples in micro-batches of all ranks."""
    return [engine.global_steps, engine.global_samples / (MICRO * RANKS)]


@on_ranks(RANKS)
def test_samples_are_those_of_the_passes_of_each_step() -> None:
    engine = started(managed_gradient_accumulation=False)
    seen = []
    for passes in (3, 1, 2):
        for _ in range(passes):
            engine.backward(loss(engine))
        engine.step()
        seen.append(counts(engine))
    engine.backward(loss(engine))
    engine.zero_grad()  # which keeps it, at stage 2
    engine.optimizer.zero_grad()  # that pass is of no step
    engine.backward(loss(engine))
    with contextlib.suppress(ValueError):
        engine.backward(torch.ones(2))
    value = loss(engine)
    engine.backward(value, retain_graph=True)
    engine.backward(value)
    engine.step()
    assert [*seen, counts(engine)] == [[1, 3], [2, 4], [3, 6], [4, 8]]
    close(engine)
