"""Versions of parameters that move without a write, as by ``p.set_(p)``: no edits, and no error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from shardwise.plan import Plan
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, data, loss_of, seeded, sgd, sharded
from tests.support.sets import full

State = dict[str, Tensor]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class Parametrized(nn.Module):
    """Its weight is computed with for the time of a forward pass, as adapters of single parameters do it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.unsafe = False

    def forward(self, x: Tensor) -> Tensor:
        register_parametrization(self.base, "weight", Doubled(), unsafe=self.unsafe)
        try:
            out: Tensor = self.base(x)
        finally:
            remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return out


def parametrized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Parametrized(), nn.Linear(6, 6))


def set_to_itself(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.set_(param)


def trained_plainly(unsafe: bool) -> State:
    model = seeded(parametrized)
    model[1].unsafe = unsafe
    optimizer = sgd(model)
    for index in range(2):
        sum(model(data(rank, 0, index)).square().mean() for rank in range(2)).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def trained_parametrized(plan: Plan, unsafe: bool) -> State:
    model = seeded(parametrized)
    model[1].unsafe = unsafe
    with sharded(model, sgd(model), plan) as session:
        for index in range(2):
            with torch.no_grad():
                loss_of(session, index)
            session.backward(loss_of(session, index))
            set_to_itself(model)
            session.optimizer.step()
            set_to_itself(model)
        return session.module.state_dict()


def moved_plans() -> dict[str, Plan]:
    return {
        **{name: PLANS[name] for name in ("zero1", "zero2", "zero3", "zero3_gloo", "zero3_tensor", "half")},
        "zero3-host": PLANS["zero3_gloo"].but(param_host_fraction=1.0, state_host_fraction=1.0),
        "zero2-host": PLANS["zero2"].but(state_host_fraction=1.0),
        "zero3-int8": PLANS["zero3"].but(compress_frozen="int8"),
    }


QUICK_MOVES = ("zero2-host", "zero3")


@pytest.mark.parametrize("name", [*QUICK_MOVES, *full(*(name for name in moved_plans() if name not in QUICK_MOVES))])
def test_a_version_that_moves_without_a_write_is_no_edit(name: str) -> None:
    for unsafe in (False, True):
        expected = trained_plainly(unsafe)
        for state in run_ranks(2, trained_parametrized, moved_plans()[name], unsafe):
            assert_close(state, expected, 1e-11, name)
