"""Several models and several optimizers in one process, each against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, seeded, sgd, sharded
from tests.support.sets import campaign, full

STEPS, RANKS = 3, 2
STAGES = ["ddp", "zero1", "zero2", "half", "zero3", "zero3_gloo"]


def quick(*names: str) -> list[Any]:
    """All stages: these, one that keeps parameters and one over messages in the full set, the others."""
    pairs = [name for name in ("zero2", "zero3_gloo") if name not in names]
    return [*names, *full(*pairs), *campaign(*[name for name in STAGES if name not in (*names, *pairs)])]


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


def critic_loss(d: nn.Module, g: nn.Module, rank: int, step: int) -> Tensor:
    fake = g(data(rank, step, 1)).detach()
    return d(fake).square().mean() + (1 - d(data(rank, step, 0))).square().mean()


def generator_loss(d: nn.Module, g: nn.Module, rank: int, step: int) -> Tensor:
    return (1 - d(g(data(rank, step, 2)))).square().mean()


def gan(plan: Plan, direct: bool) -> dict[str, Tensor]:
    d, g = seeded(critic, 1), seeded(generator, 2)
    with one_mesh(plan) as mesh, sharded(d, adam(d), plan, mesh) as ds, sharded(g, sgd(g), plan, mesh) as gs:
        for step in range(STEPS):
            loss = critic_loss(ds.module, gs.module, mesh.rank, step)
            loss.backward() if direct else ds.backward(loss)
            ds.optimizer.step()
            # The critic's gradients from the generator's loss are not wanted.
            loss = generator_loss(ds.module, gs.module, mesh.rank, step)
            loss.backward() if direct else gs.backward(loss)
            gs.optimizer.step()
            ds.optimizer.zero_grad()
        states = {"d": ds.module.state_dict(), "g": gs.module.state_dict()}
    return {f"{model}.{name}": value for model, state in states.items() for name, value in state.items()}


def plain_gan() -> dict[str, Tensor]:
    d, g = seeded(critic, 1), seeded(generator, 2)
    optimizer_d, optimizer_g = adam(d), sgd(g)
    for step in range(STEPS):
        for optimizer, loss in ((optimizer_d, critic_loss), (optimizer_g, generator_loss)):
            optimizer_d.zero_grad()
            optimizer_g.zero_grad()
            for rank in range(RANKS):
                (loss(d, g, rank, step) / RANKS).backward()
            optimizer.step()
    states = {"d": d.state_dict(), "g": g.state_dict()}
    return {f"{model}.{name}": value for model, state in states.items() for name, value in state.items()}


@pytest.mark.parametrize("name", quick("zero3"))
def test_gan(name: str) -> None:
    expected = plain_gan()
    for direct in (False, True):
        check(run_ranks(RANKS, gan, PLANS[name], direct), expected, f"{name}, direct={direct}")


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model[0].parameters(), lr=0.05, eps=1e-4),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]


def two_optimizers(plan: Plan) -> dict[str, Tensor]:
    """Stepped in turn: the second one accumulates over two passes what the first uses at once."""
    model = seeded(generator)
    session = build(model, halves(model), plan)
    assert len(session.optimizers) == 2
    for step in range(STEPS):
        for micro in range(2):
            session.backward(session.module(data(session.mesh.rank, step, micro)).square().mean())
            session.optimizers[0].step()
        session.optimizers[1].step()
    state = session.module.state_dict()
    session.close()
    session.mesh.close()
    return state


@pytest.mark.parametrize(
    ("name", "average"),
    [
        *[("zero2", "mean"), ("zero3", "sum")],
        *full(("zero2", "sum"), ("zero3", "mean"), ("ddp", "mean"), ("zero1", "sum"), ("half", "sum")),
        *full(("zero3_gloo", "mean")),
        *campaign(("ddp", "sum"), ("zero1", "mean"), ("half", "mean"), ("zero3_gloo", "sum")),
    ],
)
def test_two_optimizers_over_one_model(name: str, average: str) -> None:
    model = seeded(generator)
    first, second = halves(model)
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(RANKS):
                (model(data(rank, step, micro)).square().mean() / RANKS).backward()
            first.step()
            first.zero_grad()
        if average == "mean":
            for p in model[2].parameters():
                p.grad /= 2
        second.step()
        second.zero_grad()
    results = run_ranks(RANKS, two_optimizers, PLANS[name].but(average=average))
    check(results, dict(model.state_dict()), f"{name} {average}")
