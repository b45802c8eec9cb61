"""Uses of ``.grad`` that a sharded model cannot serve are errors that say so, on every rank, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.utils.dlpack
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardwise.core.grads.sharded_grad import ShardedGrad
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, data, one_mesh, seeded, sgd, sharded
from tests.support.engine_setup import tanh_net as net
from tests.support.sets import full


@contextmanager
def ready(plan: Plan, mesh: Mesh) -> Iterator[tuple[nn.Module, Session]]:
    """A model after its first backward pass."""
    model = seeded(net)
    with sharded(model, sgd(model), plan, mesh) as session:
        session.backward(loss_of(session))
        yield model, session


def loss_of(session: Session, micro: int = 0) -> Tensor:
    return session.module(data(session.mesh.rank, 0, micro)).square().mean()


def grad(model: nn.Module, name: str = "0.weight") -> Tensor:
    found = dict(model.named_parameters())[name].grad
    assert isinstance(found, ShardedGrad)
    return found


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda params: torch.optim.Adam(params, foreach=False),
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=True),
}


def made_afterwards(plan: Plan) -> list[tuple[str, bool, str]]:
    found = []
    with one_mesh(plan) as mesh, ready(plan, mesh) as (model, session):
        before = session.module.state_dict()
        for make in OPTIMIZERS.values():
            error = said(make(model[2].parameters()).step)
            after = session.module.state_dict()
            found.append((error, all(torch.equal(before[key], after[key]) for key in before), ""))
        by_hand = said(lambda: torch.no_grad()(lambda: model[0].bias.add_(grad(model, "0.bias"), alpha=-0.1))())
        found.append((by_hand, True, ""))
        session.optimizer.step()
        session.optimizer.zero_grad()
        found.append(("", True, said(torch.optim.SGD(model.parameters(), lr=0.1).step)))  # as in plain torch
    return found


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "zero3_gloo")])
def test_an_optimizer_made_after_sharding(name: str) -> None:
    for *optimizers, by_hand, without in run_ranks(2, made_afterwards, PLANS[name]):
        for what, (error, same, _) in zip(OPTIMIZERS, optimizers, strict=True):
            assert "2.weight.grad by step() of a " + what.split()[0] in error and "before boost/build" in error, what
            assert same, what
        assert "updates '0.bias'" in by_hand[0] or "0.bias.grad" in by_hand[0]
        assert without[2] == "nothing"


def refused(plan: Plan) -> dict[str, str]:
    found = {}
    with one_mesh(plan) as mesh, ready(plan, mesh) as (model, session):
        weight, kept = model[0].weight, grad(model)
        found["all_reduce"] = said(lambda: dist.all_reduce(kept))
        found["printed"] = f"{kept} {kept!r} {[kept]}"
        found["pointer"] = said(kept.data_ptr)
        values = kept.clone()
        assert torch.equal(torch.tensor(kept.tolist(), dtype=torch.float64), values)
        assert (kept.numpy() == values.numpy()).all()
        session.optimizer.step()
        found["consumed"] = said(lambda: clip_grad_norm_(model.parameters(), 1.0))
        found["consumed read"] = said(kept.clone)
        session.optimizer.zero_grad()
        assert weight.grad is None
        found["dropped"] = said(kept.norm)
        session.backward(loss_of(session))
        assert weight.grad is kept
        seen: list[str] = []
        handle = weight.register_hook(lambda _: seen.append(said(kept.norm)))
        session.backward(loss_of(session))
        found["running"] = seen[0]
        handle.remove()
        handle = weight.register_post_accumulate_grad_hook(lambda _: None)
        found["hook"] = said(lambda: session.backward(loss_of(session)))
        handle.remove()
        session.optimizer.zero_grad()
        session.backward(loss_of(session))
        assert torch.allclose(grad(model), values * 0 + grad(model).clone())
        session.optimizer.zero_grad()
        loss_of(session).backward(create_graph=True)
        found["graph"] = said(lambda: kept.square().sum())
        with torch.no_grad():
            assert float(kept.square().sum()) > 0
    found["closed"] = said(kept.clone)
    return found


@pytest.mark.parametrize("name", ["zero2", *full("ddp", "zero3", "zero3_gloo")])
def test_uses_that_are_refused(name: str) -> None:
    for found in run_ranks(2, refused, PLANS[name]):
        assert "averaged over the ranks already" in found["all_reduce"]
        assert found["printed"].count("ShardedGrad(of '0.weight', shape=(8, 6)") == 3
        assert "clone()" in found["pointer"]
        for what in ("consumed", "consumed read", "dropped"):
            assert (
                "0.weight.grad" in found[what] and "after step() has used it, or zero_grad() dropped it" in found[what]
            )
        assert "0.weight.grad while a backward pass runs" in found["running"]
        assert "0.weight has a post-accumulate-grad hook" in found["hook"] and "register_hook" in found["hook"]
        assert "0.weight.grad of a pass with create_graph=True" in found["graph"]
        assert "RuntimeError" in found["closed"]


def unreduced(plan: Plan) -> list[str]:
    with one_mesh(plan) as mesh, ready(plan, mesh) as (model, session):
        with session.no_sync():
            session.backward(loss_of(session, 1))
        found = [said(lambda: clip_grad_norm_(model.parameters(), 1.0))]
        session.backward(loss_of(session, 2))
        found.append(said(lambda: clip_grad_norm_(model.parameters(), 1.0)))
    return found


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_gradients_that_are_not_reduced(name: str) -> None:
    for before, after in run_ranks(2, unreduced, PLANS[name]):
        assert "0.weight.grad after a pass under no_sync()" in before
        assert after == "nothing"


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "assigned": lambda model: setattr(model[2].bias, "grad", torch.ones(3, dtype=torch.float64)),
    "cleared": lambda model: setattr(model[2].bias, "grad", None),
    "edited": lambda model: grad(model, "2.bias").mul_(2.0),
}


def differently(plan: Plan) -> list[tuple[str, bool]]:
    found = []
    with one_mesh(plan) as mesh:
        for change in CHANGES.values():
            with ready(plan, mesh) as (model, session):
                before = session.module.state_dict()
                if mesh.rank == 1:
                    change(model)
                error = said(session.optimizer.step)
                after = session.module.state_dict()
                found.append((error, all(torch.equal(before[key], after[key]) for key in before)))
    return found


@pytest.mark.parametrize("name", ["zero3", *full("zero1", "zero2", "zero3_gloo")])
def test_ranks_that_change_gradients_differently(name: str) -> None:
    for found in run_ranks(2, differently, PLANS[name]):
        for what, (error, same) in zip(CHANGES, found, strict=True):
            assert "2.bias.grad was assigned, cleared or changed" in error and "rank 1 1" in error, what
            assert same, what


def own_gradients(model: nn.Module, session: Session, rank: int) -> None:
    made = torch.autograd.grad(loss_of(session, 1 + rank), list(model.parameters()))
    for parameter, own in zip(model.parameters(), made, strict=True):
        parameter.grad = own


def by_hand(change: Callable[[nn.Module, int], None]) -> Callable[[nn.Module, Session, int], None]:
    def passes(model: nn.Module, session: Session, rank: int) -> None:
        session.backward(loss_of(session))
        change(model, rank)

    return passes


def copied(model: nn.Module, rank: int) -> None:
    grad(model).copy_(torch.full((8, 6), 1.0 + rank, dtype=torch.float64))


def scaled(model: nn.Module, rank: int) -> None:
    grad(model).mul_(torch.full((8, 6), 1.0 + rank, dtype=torch.float64))


def nearly(model: nn.Module, rank: int) -> None:
    """As where ranks compute the same, and a device adds up in another order."""
    model[0].weight.grad = torch.full((8, 6), 1.0 + rank * 1e-10, dtype=torch.float64)


OWN: dict[str, tuple[Callable[[nn.Module, Session, int], None], str]] = {
    "assigned": (own_gradients, "0.weight.grad was given different values on the ranks (norms: rank 0"),
    "copied": (by_hand(copied), "was given different values on the ranks (norms: rank 0 "),
    "scaled": (by_hand(scaled), ""),
    "nearly the same": (by_hand(nearly), ""),
}


def of_their_own(plan: Plan) -> list[str]:
    """What a step says; without a message it is made."""
    found = []
    with one_mesh(plan) as mesh:
        for change, _ in OWN.values():
            with ready(plan, mesh) as (model, session):
                session.module.zero_grad()
                before = session.module.state_dict()
                change(model, session, mesh.rank)
                found.append(said(session.optimizer.step))
                after = session.module.state_dict()
                same = all(torch.equal(before[key], after[key]) for key in before)
                assert same == (found[-1] != "nothing")
    return found


@pytest.mark.parametrize("name", ["zero3", *full("zero1", "zero2", "hybrid")])
def test_gradients_of_a_ranks_own_are_refused(name: str) -> None:
    """In place by a tensor is not refused: a shard has one owner, whose noise is as good as any."""
    for found in run_ranks(4 if name == "hybrid" else 2, of_their_own, PLANS[name]):
        for what, step in zip(OWN, found, strict=True):
            expected = OWN[what][1] or "nothing"
            assert expected in step, (what, step)
            assert expected == "nothing" or step.endswith("nothing was updated"), what
