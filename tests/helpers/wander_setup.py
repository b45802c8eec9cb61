"""Ranks that take other ways than their peers or fail, and what they meet for."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_setup import adam, data, run_plain, seeded, sharded
from torch import Tensor, nn

from shardwise.comm import Group
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close

GLOO = zero(3).but(shared_memory=False)


@contextmanager
def counted() -> Iterator[list[str]]:
    """What ranks meet for."""
    purposes: list[str] = []

    def telling(name: str) -> Any:
        original = getattr(Group, name)

        def tell(group: Group, given: Any, purpose: str = "", *args: Any, **named: Any) -> Any:
            purposes.append(purpose)
            return original(group, given, purpose, *args, **named)

        return tell

    with mock.patch.multiple(Group, exchange=telling("exchange"), summarize=telling("summarize")):
        yield purposes


class Wanderer(nn.Module):
    """Ranks take other layers, in another order, and make sums of their own among each other in between."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.extra = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, draw: random.Random) -> Tensor:
        for layer in self.trunk:
            for each in draw.sample(range(4), draw.randrange(3)):
                x = torch.tanh(self.extra[each](x))
            nap = draw.random() / 100
            if dist.is_initialized():
                time.sleep(nap)
                dist.all_reduce(torch.ones(1))  # as a normalization over all ranks does
            x = x + torch.tanh(layer(x))
        return x


def wander(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    draw = random.Random(f"{rank} {step}")
    for index in range(2):
        yield model(data(rank, step, index), draw).square().mean(), False


def fails_and_goes_on(plan: Plan = GLOO) -> list[str]:
    model, ends = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])), []
    with sharded(model, adam(model), plan) as session:
        assert session.optimizer is not None
        for step in range(3):
            while not ends or ends[-1] != f"made {step}":
                try:
                    session.optimizer.zero_grad()
                    out = session.module(data(session.mesh.rank, step))
                    if step == 1 and session.mesh.rank and "ArithmeticError" not in ends:
                        raise ArithmeticError("broken on purpose")
                    session.backward(out.square().mean())
                    session.optimizer.step()
                    ends.append(f"made {step}")
                except (ArithmeticError, RuntimeError) as error:
                    ends.append(type(error).__name__)
                    assert len(ends) < 9, ends
        state = session.module.state_dict()
    plain = run_plain(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), _plain_step, session.mesh.size, 3)
    assert_close(state, plain, 1e-9, "after a failure")
    return ends


def _plain_step(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    yield model(data(rank, step)).square().mean(), False
