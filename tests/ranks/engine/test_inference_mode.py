"""What is asked for the first time in torch's inference mode, and again or changed outside of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardwise.core.mesh import Mesh
from shardwise.core.optim.nested_state import tensors_of
from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, seeded, sharded
from tests.support.engine_setup import tanh_net as net
from tests.support.sets import campaign, full

ROWS = {name: PLANS[name] for name in ("ddp", "zero2", "zero3", "zero3_gloo", "zero2_gloo")}
STEPS = 3
MAX_NORM = 0.05
Ask = Callable[[Session, nn.Module, Path], Any]


def state(session: Session, _model: nn.Module, _directory: Path) -> Any:
    return session.module.state_dict()


def optimizer_state(session: Session, _model: nn.Module, _directory: Path) -> Any:
    return session.optimizers[0].state_dict()


def gradients(session: Session, _model: nn.Module, _directory: Path) -> Any:
    return session.full_gradients()


def grad(_session: Session, model: nn.Module, _directory: Path) -> Any:
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert norms
    return []


def gathered(session: Session, model: nn.Module, _directory: Path) -> Any:
    with session.module.gathered():
        assert not [p for p in model.parameters() if p.isnan().any()]
    return []


def one(session: Session, model: nn.Module, _directory: Path) -> Any:
    own = session.one(next(model.parameters()))
    return [own.value(), own.state("exp_avg")]


def saved(session: Session, _model: nn.Module, directory: Path) -> Any:
    session.checkpoints.save(directory)
    return []


ASKS: list[Ask] = [state, optimizer_state, gradients, grad, gathered, one, saved]


def clipped(model: nn.Module) -> None:
    with torch.inference_mode():
        clip_grad_norm_(model.parameters(), MAX_NORM)


def plain(ranks: int) -> dict[str, Tensor]:
    model = seeded(net)
    optimizer = adam(model)
    for step in range(STEPS):
        for rank in range(ranks):
            (model(data(rank, step)).square().mean() / ranks).backward()
        clipped(model)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def trained(plan: Plan, mesh: Mesh, asks: list[Ask], directory: Path) -> dict[str, Tensor]:
    model = seeded(net)
    with sharded(model, adam(model), plan, mesh) as session:
        own = session.optimizers[0]
        for step in range(STEPS):
            if step:
                with torch.inference_mode():
                    session.module(data(0, 9))
            session.backward(session.module(data(mesh.rank, step)).square().mean())
            if step == 1:
                with torch.inference_mode():
                    found = [ask(session, model, directory) for ask in asks]
                for each in tensors_of(found):
                    assert not each.is_inference()
                    each.zero_()  # the user's own
            if step == 2:
                for ask in asks:
                    ask(session, model, directory)
            clipped(model)
            own.step()
            own.zero_grad()
        return session.module.state_dict()


def every(plan: Plan, directory: str) -> list[dict[str, Tensor]]:
    with one_mesh(plan) as mesh:
        orders = [*([ask] for ask in ASKS), ASKS, ASKS[::-1]]
        return [trained(plan, mesh, asks, Path(directory) / str(at)) for at, asks in enumerate(orders)]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *[(1, "zero2"), (2, "zero3")],
        *full((1, "zero3"), (2, "ddp"), (2, "zero2"), (2, "zero3_gloo"), (2, "zero2_gloo")),
        *campaign((1, "ddp"), (1, "zero3_gloo"), (1, "zero2_gloo")),  # one rank sends nothing
    ],
)
def test_asked_in_inference_mode(ranks: int, name: str, tmp_path: Path) -> None:
    """A buffer that is kept was made in it, so every later state was an error."""
    expected = plain(ranks)
    for found in run_ranks(ranks, every, ROWS[name], str(tmp_path), timeout=200.0):
        for each in found:
            check([each], expected, f"{name}, {ranks} ranks", 1e-10)
