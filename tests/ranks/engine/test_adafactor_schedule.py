"""The proxy scheduler of Hugging Face's Adafactor, which reads the optimizer's state by parameter."""

from __future__ import annotations

import warnings

import torch
from engine_setup import check, data, seeded, sharded, told
from torch import Tensor, nn
from transformers.optimization import Adafactor, AdafactorSchedule

from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def adafactor(model: nn.Module, relative: bool) -> torch.optim.Optimizer:
    return Adafactor(model.parameters(), lr=None if relative else 0.1, relative_step=relative)


def scheduled(plan: Plan, relative: bool) -> tuple[dict[str, Tensor], list[str]]:
    model = seeded(Net)
    optimizer = adafactor(model, relative)
    schedule = AdafactorSchedule(optimizer)
    with warnings.catch_warnings(record=True) as caught, sharded(model, optimizer, plan) as session:
        warnings.simplefilter("always")
        assert session.optimizer is not None
        for step in range(STEPS):
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
            if not relative:
                return {}, [told(schedule.step)]
            schedule.step()
            session.optimizer.zero_grad()
        return session.module.state_dict(), [str(each.message) for each in caught]


def test_the_schedule_that_shows_rates_of_adafactor() -> None:
    for ranks in (1, 2):
        model = seeded(Net)
        optimizer = adafactor(model, True)
        schedule = AdafactorSchedule(optimizer)
        for step in range(STEPS):
            for rank in range(ranks):
                (model(data(rank, step)).square().mean() / ranks).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        every = run_ranks(ranks, scheduled, zero(3), True)
        check([found for found, _ in every], dict(model.state_dict()), f"{ranks} ranks", 1e-6)
        for _, messages in every:
            assert any("are not those of the steps" in each for each in messages)
    for _, (message,) in run_ranks(2, scheduled, zero(3), False):
        assert "optimizer.state of 'first.weight'" in message, "the rate would be that of steps"
