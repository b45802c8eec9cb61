"""The proxy scheduler of Hugging Face's Adafactor, which reads the optimizer's state by parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor, AdafactorSchedule

from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import data, seeded, sharded, told


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def adafactor(model: nn.Module, relative: bool) -> torch.optim.Optimizer:
    return Adafactor(model.parameters(), lr=None if relative else 0.1, relative_step=relative)


def scheduled(plan: Plan, relative: bool) -> str:
    model = seeded(Net)
    optimizer = adafactor(model, relative)
    schedule = AdafactorSchedule(optimizer)
    with sharded(model, optimizer, plan) as session:
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean())
        session.optimizer.step()
        return told(schedule.step)


def test_the_schedule_that_reads_the_state_of_adafactor_is_refused() -> None:
    for relative in (True, False):
        for message in run_ranks(2, scheduled, zero(3), relative):
            assert "optimizer.state['first.weight']" in message, "the rate would be that of steps"
