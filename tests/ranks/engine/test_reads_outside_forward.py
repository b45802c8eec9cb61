"""Parameters that a loss takes from the model by itself: right where they are there, else an error or a warning."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, data, one_mesh, seeded, sgd, sharded

STEPS = 2


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def encode(self, x: Tensor) -> Tensor:
        return self.tower(x) * self.scale

    def forward(self, x: Tensor, penalty: bool = False) -> Tensor:
        found = self.encode(x)
        if penalty:
            found = found + sum(p.abs().sum() for p in self.tower.parameters())
        return found


Loss = Callable[[nn.Module, Towers, Tensor], Tensor]


def by_method(_module: nn.Module, model: Towers, x: Tensor) -> Tensor:
    return model.encode(x).square().mean()


def penalty_in_the_loop(module: nn.Module, model: Towers, x: Tensor) -> Tensor:
    loss: Tensor = module(x).square().mean()
    return loss + 0.1 * sum(p.square().sum() for p in model.parameters())


def penalty_in_forward(module: nn.Module, _model: Towers, x: Tensor) -> Tensor:
    return module(x, penalty=True).square().mean()


LOSSES: dict[str, Loss] = {each.__name__: each for each in (by_method, penalty_in_the_loop, penalty_in_forward)}


def plain(loss: Loss) -> dict[str, Tensor]:
    model = seeded(Towers)
    optimizer = sgd(model)
    for step in range(STEPS):
        (sum(loss(model, model, data(rank, step)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def train(session: Session, loss: Loss, around: Callable[[], Any] = contextlib.nullcontext) -> dict[str, Tensor]:
    optimizer = session.optimizer
    for step in range(STEPS):
        with around():
            value = loss(session.module, session.model, data(session.mesh.rank, step))  # type: ignore[arg-type]
        session.backward(value)
        optimizer.step()
        optimizer.zero_grad()
    return session.module.state_dict()


def trained(plan: Plan, name: str, gathered: bool) -> dict[str, Tensor]:
    model = seeded(Towers)
    with sharded(model, sgd(model), plan) as session:
        return train(session, LOSSES[name], session.module.gathered if gathered else contextlib.nullcontext)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_there_is_read_as_in_plain_torch(name: str) -> None:
    for plan, gathered in (("zero2", False), ("zero3", True), ("half", True)):
        for found in run_ranks(2, trained, PLANS[plan], name, gathered):
            assert_close(found, plain(LOSSES[name]), 1e-12, f"{name} under {plan}")


def misread(plan: Plan, name: str) -> tuple[str, list[str], dict[str, Tensor]]:
    """What is raised, what is warned of in two passes, and what the model is trained to after these were dropped."""
    model, error = seeded(Towers), "nothing"
    with one_mesh(plan) as mesh, sharded(model, sgd(model), plan, mesh) as session:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                try:
                    session.backward(LOSSES[name](session.module, model, data(mesh.rank, 0)))  # type: ignore[arg-type]
                except RuntimeError as found:
                    error = str(found)
                session.module.zero_grad()
        state = train(session, lambda module, _model, x: module(x).square().mean())
        return error, [str(each.message) for each in told if "the loss is NaN" in str(each.message)], state


SAID = {
    "by_method": ("scale got a gradient, but no forward pass has gathered it", 1),
    "penalty_in_the_loop": ("nothing", 1),
    "penalty_in_forward": ("tower.0.weight (8, 6) was used in a forward pass while it was NaN", 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_there_is_told(name: str) -> None:
    error, times = SAID[name]
    expected = plain(lambda module, _model, x: module(x).square().mean())
    for said, told, state in run_ranks(2, misread, PLANS["zero3"], name):
        assert error in said and len(told) == times
        assert all("inside `with model.gathered():`" in each for each in [*told, *[said][: error != "nothing"]])
        assert_close(state, expected, 1e-12, "what is trained after the passes that were dropped")
