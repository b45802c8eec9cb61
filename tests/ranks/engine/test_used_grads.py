"""A step uses gradients up: a program that goes on as if they were there is told once, every other is left alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, check, data, plain_steps, scaler, seeded, sgd, sharded
from tests.support.sets import full

STEPS = 3
ROWS = {name: PLANS[name] for name in ("ddp", "zero1", "zero2", "zero3")}
ROWS |= {"zero3_streams": zero(3).but(update="backward")}
SCALER = scaler(initial_scale=8.0, growth_interval=9, max_scale=64.0)
ROWS |= {"zero2_scaled": zero(2).but(scaler=SCALER), "zero2_mean": zero(2).but(average="mean")}


def quick(*names: str) -> list[Any]:
    """All rows, of which the others are in the full set."""
    return [*names, *full(*[name for name in ROWS if name not in names])]


WORDS = "without zero_grad() since the step before"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def _told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [each.filename for each in caught if WORDS in str(each.message)]


def _pass(session: Session, step: int) -> None:
    session.backward(session.module(data(session.mesh.rank, step)).square().mean())


def _forgetful(plan: Plan) -> tuple[list[str], dict[str, Tensor]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = seeded(_model)
        with sharded(model, sgd(model), plan) as session:
            for step in range(STEPS):
                _pass(session, step)
                session.optimizer.step()
            return _told(caught), session.module.state_dict()


def _plain(ranks: int) -> dict[str, Tensor]:
    model = seeded(_model)
    return plain_steps(model, sgd(model), STEPS, ranks=ranks)


@pytest.mark.parametrize("name", quick("zero2", "zero3_streams", "zero2_scaled"))
def test_steps_without_zero_grad_are_told_once_and_use_their_own_gradients(name: str) -> None:
    results = run_ranks(2, _forgetful, ROWS[name])
    for told, _ in results:
        assert told == [__file__]  # at the line that steps
    check([state for _, state in results], _plain(2), name, rtol=1e-6 if "scaled" in name else 1e-11)


def _after_step(session: Session, at: str) -> None:
    if at == "after step":
        session.optimizers[0].zero_grad()


def _before_pass(session: Session, at: str) -> None:
    if at == "optimizer":
        session.optimizers[0].zero_grad()
    elif at == "zeros":
        session.optimizers[0].zero_grad(set_to_none=False)
    elif at == "groups":
        for group in session.optimizers[0].param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
    elif at in ("inherited", "inherited foreach"):
        # As of a wrapper that shares the groups and has torch's own.
        wrapper = torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {"foreach": "foreach" in at})
        wrapper.param_groups = session.optimizers[0].param_groups
        wrapper.zero_grad(set_to_none=False)
    elif at == "module":
        session.module.zero_grad()
    elif at == "own model":
        session.model.zero_grad()
    elif at == "by hand":
        for parameter in session.module.parameters():
            parameter.grad = None


def _careful(plan: Plan, at: str) -> tuple[list[str], dict[str, Tensor]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = seeded(_model)
        with sharded(model, sgd(model), plan) as session:
            for step in range(STEPS):
                _before_pass(session, at)
                loss = session.module(data(session.mesh.rank, step)).square().mean()
                if at == "after forward":
                    session.optimizer.zero_grad()
                session.backward(loss)
                session.optimizer.step()
                _after_step(session, at)
            return _told(caught), session.module.state_dict()


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *[("zero1", "after step"), ("zero3", "optimizer"), ("zero3_streams", "groups"), ("zero1", "inherited")],
        *full(("zero3", "zeros"), ("zero1", "own model"), ("zero3", "module"), ("zero1", "by hand")),
        *full(("zero3", "after forward"), ("zero1", "inherited foreach")),
    ],
)
def test_a_loop_with_zero_grad_anywhere_is_left_alone(name: str, at: str) -> None:
    results = run_ranks(2, _careful, ROWS[name], at)
    assert [told for told, _ in results] == [[], []]
    check([state for _, state in results], _plain(2), f"{name}, {at}")


def _again(plan: Plan) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = seeded(_model)
        with sharded(model, sgd(model), plan) as session:
            _pass(session, 0)
            session.optimizer.step()
            before = _told(caught)
            session.optimizer.step()  # plain PyTorch takes the same step twice
            return before + _told(caught)


@pytest.mark.parametrize("name", ["zero3", *full("zero1")])
def test_a_second_step_without_a_pass_is_told(name: str) -> None:
    assert run_ranks(2, _again, ROWS[name]) == [[__file__]] * 2
