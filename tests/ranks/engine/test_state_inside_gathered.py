"""A state that is taken inside ``gathered(write_back=True)`` has what was written there, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, data, sharded
from tests.support.tier_setup import with_tiers

State = dict[str, Tensor]
STAGES = ("ddp", "zero1", "zero2", "zero3", "zero3_straddling", "zero3_gloo")


def net() -> nn.Module:
    """A layer of it is frozen, as the base of an adapter is."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6), nn.LayerNorm(6))
    model[0].requires_grad_(False)
    return model


def plan_of(name: str, half: bool, tiers: str, directory: str) -> Plan:
    plan = with_tiers(PLANS[name], tiers, directory) if tiers else PLANS[name]
    return plan.but(precision=zero(2, torch.bfloat16).precision) if half else plan


def times(session: Session, factor: float, replace: bool = False) -> None:
    """A power of two, so that what was done can be undone to the bit; ``replace``: one parameter by other data."""
    first = session.params[0]
    with torch.no_grad():
        for param in session.model.parameters():
            if replace and param is first:
                param.data = param.data * factor
            else:
                param.mul_(factor)


def shown(session: Session) -> State:
    return {name: param.detach().float().clone() for name, param in session.model.named_parameters()}


def trained(session: Session, step: int) -> None:
    session.backward(session.module(data(session.mesh.rank, step).float()).float().square().mean())
    session.optimizer.step()  # type: ignore[union-attr]


def states(session: Session, directory: str) -> dict[str, State]:
    """By what takes them."""
    own = zip(session.engine.shards.layout.facts, session.params, strict=True)
    values = {fact.names[0]: session.one(param).value() for fact, param in own}  # type: ignore[union-attr]
    session.checkpoints.save(directory, "inside", use_async=True)
    mine = {name: value.clone() for name, value in session.model.state_dict().items()}
    return {"state_dict": session.module.state_dict(), "own": mine, "one": values}


def inside(plan: Plan, directory: str, take: bool) -> dict[str, Any]:
    model = net()
    with sharded(model, adam(model), plan) as session:
        trained(session, 0)
        before, found = session.module.state_dict(), dict[str, State]()
        with session.module.gathered(write_back=True):
            times(session, 2.0, replace=take)
            expected = shown(session)
            if take:
                found = states(session, directory)
                assert all(torch.equal(value, expected[name]) for name, value in shown(session).items())
            times(session, 2.0)
            with session.module.gathered():
                again = {"nested": session.module.state_dict()} if take else {}
            times(session, 0.25)
            session.backward(session.module(data(session.mesh.rank, 1).float()).float().square().mean())
        session.checkpoints.wait_for_saves()
        after = session.module.state_dict()
        session.optimizer.step()  # type: ignore[union-attr]
        trained(session, 2)
        doubled = {name: {n: v / 2 for n, v in state.items()} for name, state in again.items()}
        return {
            "before": before,
            "expected": expected,
            "found": found | doubled,
            "after": after,
            "end": session.module.state_dict(),
        }


def same(state: State, other: State, what: object) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value.float(), other[name].float()), (what, name)


def check_inside(plan: Plan, half: bool, directory: Path) -> None:
    ranks = run_ranks(2, inside, plan, str(directory), True)
    without = run_ranks(2, inside, plan, str(directory), False)
    for rank, other in zip(ranks, without, strict=True):
        for what, state in rank["found"].items():
            same(state, rank["expected"], what)
        # Masters keep what 16 bits cannot hold where the parameter was not written to; these were.
        same({n: v.bfloat16() if half else v for n, v in rank["after"].items()}, shows(rank["before"], half), "after")
        if not half:
            same(rank["end"], other["end"], "trained after it")
    with open_checkpoint(directory / "inside") as source:
        for name, value in ranks[0]["expected"].items():
            assert torch.equal(source.read(f"model/{name}", 0, value.numel()).view(value.shape).float(), value), name


def shows(state: State, half: bool) -> State:
    return {name: value.bfloat16().float() if half else value for name, value in state.items()}


HALF = {False: "fp32", True: "bf16"}


def inside_set(name: str, half: bool) -> list[pytest.MarkDecorator]:
    """Both numbers once, with parameters that stay and that are gathered; plans and numbers alternate behind these."""
    if (name, half) in (("zero2", True), ("zero3", False)):
        return []
    return [pytest.mark.full if STAGES.index(name) % 2 == half else pytest.mark.campaign]


@pytest.mark.parametrize(
    ("name", "half"), [pytest.param(n, h, id=f"{n}-{HALF[h]}", marks=inside_set(n, h)) for n in STAGES for h in HALF]
)
def test_a_state_taken_inside_has_what_was_written(name: str, half: bool, tmp_path: Path) -> None:
    check_inside(plan_of(name, half, "", str(tmp_path)), half, tmp_path / "runs")


def only_read(plan: Plan) -> tuple[State, State, State]:
    model = net()
    with sharded(model, adam(model), plan) as session:
        before = session.module.state_dict()
        with session.module.gathered():
            times_in_place(session.model)
            inside = session.module.state_dict()
        return before, inside, session.module.state_dict()


def times_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)


def test_without_write_back_what_is_written_counts_nowhere() -> None:
    for before, inside, after in run_ranks(2, only_read, PLANS["zero3"]):
        same(inside, before, "inside")
        same(after, before, "after")
