"""State dicts, schedulers and several optimizers under CPU and NVMe offload: the same bits in every mix of tiers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import one_mesh, sharded
from tests.support.on_ranks import on_ranks
from tests.support.sets import campaign, full
from tests.support.tier_setup import backward, batch, digest, everything, make_net, small_tiles, with_tiers

MIXES = ("all_host", "s_disk", "p_disk_s_host", "all_disk", "thirds")
SOME = {"zero1": ("s_disk",), "zero2_bf16": ("p_disk_s_host", "all_host"), "zero3_bf16": ("thirds", "all_disk")}
"""The full set has each mix with one plan; ``-m campaign`` has every mix with every plan."""


def cases(quick: str) -> list[Any]:
    some = [row for each in SOME.items() for row in ([each] if each[0] == quick else full(each))]
    return [*some, *campaign(*[(name, MIXES) for name in SOME])]


PLANS = {"zero1": zero(1), "zero2_bf16": zero(2, torch.bfloat16), "zero3_bf16": zero(3, torch.bfloat16)}
State = dict[str, Any]


@contextlib.contextmanager
def session_of(plan: Plan, mesh: Mesh, seed: int = 0) -> Iterator[tuple[Session, Any]]:
    """Return a session of the small net with AdamW in two groups, and a scheduler."""
    model = make_net(seed)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
    session = build(model, optimizer, plan, mesh)
    yield session, torch.optim.lr_scheduler.ExponentialLR(session.optimizer, 0.7)
    session.close()


def steps(session: Session, scheduler: Any, first: int, last: int) -> None:
    for step in range(first, last):
        backward(session, step, passes=1 + step % 2)
        session.optimizer.step()
        scheduler.step()


def evaluate(session: Session) -> str:
    session.module.eval()
    with torch.no_grad():
        output = session.module(batch(9, 9))
    session.module.train()
    return digest(output)


def a_life(plan: Plan, mesh: Mesh) -> tuple[dict[str, Any], State]:
    """Evaluate, train, drop a pass, take a state and train again; return what each of them gives."""
    seen: dict[str, Any] = {}
    with session_of(plan, mesh) as (session, scheduler):
        seen["evaluated before training"] = evaluate(session)
        steps(session, scheduler, 0, 2)
        backward(session, 77)
        session.optimizer.zero_grad()
        steps(session, scheduler, 2, 3)
        state = {"model": session.module.state_dict(), "optimizer": session.optimizer.state_dict()}
        state["scheduler"] = scheduler.state_dict()
        seen["model state"], seen["optimizer state"] = digest(state["model"]), digest(state["optimizer"])
        seen["evaluated"] = evaluate(session)
        steps(session, scheduler, 3, 5)
        seen["end"] = everything(session)
    return seen, state


def resumed(plan: Plan, mesh: Mesh, state: State) -> dict[str, Any]:
    """Return the end of the same run, resumed from its state over other weights and another optimizer state."""
    with session_of(plan, mesh, seed=5) as (session, scheduler):
        steps(session, scheduler, 50, 51)
        session.module.load_state_dict(state["model"])
        session.optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        same = digest(session.module.state_dict()) == digest(state["model"])
        assert same and digest(session.optimizer.state_dict()) == digest(state["optimizer"])
        steps(session, scheduler, 3, 5)
        return everything(session)


def lives(plan: Plan, mixes: tuple[str, ...], directory: str) -> None:
    with small_tiles(), one_mesh(plan) as mesh:
        expected, state = a_life(plan, mesh)
        for mix in mixes:
            found, own_state = a_life(with_tiers(plan, mix, directory), mesh)
            assert found == expected, mix
            assert resumed(with_tiers(plan, mix, directory), mesh, state) == expected["end"], mix
        assert resumed(plan, mesh, own_state) == expected["end"]


@pytest.mark.parametrize(("name", "mixes"), cases("zero3_bf16"))
def test_states_are_the_same_in_all_tiers(name: str, mixes: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(2, lives, PLANS[name], mixes, str(tmp_path), timeout=120.0)
    assert not list(tmp_path.iterdir())


def two_optimizers(plan: Plan, mesh: Mesh) -> dict[str, str]:
    model = make_net()
    params = [p for p in model.parameters() if p.requires_grad]
    kinds = [torch.optim.AdamW(params[:3], lr=1e-2), torch.optim.SGD(params[3:], lr=0.1)]
    with sharded(model, kinds, plan, mesh) as session:
        first, second = session.optimizers
        for step in range(3):
            for optimizer, sign in ((second, -1.0), (first, 1.0)):
                session.module.zero_grad()
                optimizer.backward(sign * session.module(batch(mesh.rank, step)).float().square().mean())
                optimizer.step()
        return everything(session)


@pytest.mark.parametrize(("name", "mixes"), cases("zero1"))
@on_ranks(2, timeout=120.0)
def test_two_optimizers_give_the_same_bits_in_all_tiers(name: str, mixes: tuple[str, ...], tmp_path: Path) -> None:
    plan = PLANS[name]
    with small_tiles(), one_mesh(plan) as mesh:
        expected = two_optimizers(plan, mesh)
        for mix in mixes:
            assert two_optimizers(with_tiers(plan, mix, str(tmp_path)), mesh) == expected, mix
