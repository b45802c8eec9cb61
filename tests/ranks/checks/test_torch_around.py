"""torch's own data parallelism left around a model that is sharded: refused, since it would train by gradients of 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, check, data, one_mesh, run_plain, seeded, sharded, told
from tests.support.sets import full

RESIDENT = ["ddp", "zero1", "zero2"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def one_pass(model: nn.Module, rank: int, step: int):  # type: ignore[no-untyped-def]
    yield model(data(rank, step)).square().mean(), False


# ---- as the model, or in it

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DDP,
    "DataParallel": nn.DataParallel,
}


def given(kind: str) -> list[str]:
    said = []
    for inside in (False, True):
        model = seeded(net)
        wrapped = WRAPPERS[kind](model)
        outer = nn.Sequential(wrapped) if inside else wrapped
        for name in ("ddp", "zero2", "zero3"):
            said.append(told(lambda outer=outer, name=name: build(outer, adam(outer), PLANS[name]), ValueError))
        assert not any(vars(module).get("_is_sharded") for module in model.modules())
    return said


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_a_model_in_a_wrapper_of_torch_is_refused(kind: str, ranks: int) -> None:
    for outermost, *_, inside in run_ranks(ranks, given, kind):
        assert f"module '' of the model is a {kind}" in outermost and "pass the wrapped model" in outermost
        assert f"module '0' of the model is a {kind}" in inside


# ---- around it


class Outer(nn.Module):
    """Has no attributes of the module in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def around(name: str) -> tuple[list[str], dict[str, Tensor]]:
    """What is said, and the state after two steps in spite of it."""
    said: list[str] = []
    model = seeded(net)
    with one_mesh(PLANS[name]) as mesh:
        with sharded(model, adam(model), PLANS[name], mesh) as session:
            said += [told(lambda: DDP(session.module)), told(lambda: DDP(session.model))]
            if name in RESIDENT:
                hidden = DDP(Outer(session.module))
                said.append(told(lambda: hidden(data(mesh.rank, 0))))
                del hidden
            for step in range(2):
                train(session, step)
            state = session.module.state_dict()
            session.unshard()
        DDP(model)(data(mesh.rank, 0)).sum().backward()  # it is the user's again
        assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0
    return said, state


def train(session: Session, step: int) -> None:
    session.module(data(session.mesh.rank, step)).square().mean().backward()
    session.optimizer.step()
    session.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ddp", 1), ("zero2", 2), ("zero3", 2), *full(("ddp", 2), ("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero3", 1))],
)
def test_ddp_around_a_sharded_model_is_refused_and_changes_nothing(name: str, ranks: int) -> None:
    found = run_ranks(ranks, around, name)
    for said, _ in found:
        assert len(said) == (3 if name in RESIDENT else 2)
        assert all("DistributedDataParallel around a sharded Sequential" in message for message in said), said
    check([state for _, state in found], run_plain(net, one_pass, ranks, 2), name)


def before_the_model_was_sharded() -> str:
    model = seeded(net)
    outer = DDP(model)
    with sharded(model, adam(model), PLANS["zero1"]) as session:
        message = told(lambda: outer(data(session.mesh.rank, 0)))
        train(session, 0)  # without it
        return message


def test_a_ddp_that_was_made_before_is_refused_when_it_runs() -> None:
    for message in run_ranks(2, before_the_model_was_sharded):
        assert "DistributedDataParallel around a sharded Sequential" in message
