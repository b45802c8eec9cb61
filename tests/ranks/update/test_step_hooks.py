"""Step pre-hooks where torch runs them: before the closure, and before anything is made of gradients and rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import SCALER, check, data, one_mesh, plain_steps, seeded, sharded, told
from tests.support.engine_setup import tanh_net as net
from tests.support.sets import full

STEPS = 3
SCALED = {
    "zero1": zero(1).but(scaler=SCALER),
    "zero3": zero(3).but(scaler=SCALER),
    "zero2_clipped": zero(2).but(scaler=SCALER, max_norm=0.02),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)


class Hook:
    """Halves the rate, clips, and takes the mean out of each gradient."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def __call__(self, optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            self.norms.append(float(clip_grad_norm_(group["params"], 0.05)))
            for param in group["params"]:
                param.grad = param.grad - param.grad.mean()


def clip(model: nn.Module, max_norm: float) -> None:
    clip_grad_norm_(model.parameters(), max_norm)


def plain(ranks: int, max_norm: float = 0.0) -> tuple[list[float], dict[str, Tensor]]:
    model, hook = seeded(net), Hook()
    optimizer = adam(model)
    optimizer.register_step_pre_hook(hook)
    if max_norm:
        optimizer.register_step_pre_hook(lambda *_: clip(model, max_norm))
    state = plain_steps(model, optimizer, STEPS, ranks=ranks)
    return hook.norms, state


def under_a_scale(plan: Plan) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """With a fourth step that is skipped."""
    model, hook = seeded(net), Hook()
    optimizer = adam(model)
    optimizer.register_step_pre_hook(hook)
    with sharded(model, optimizer, plan) as session:
        norms = []
        for step in range(STEPS):
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
            norms.append(session.optimizer.get_grad_norm() or 0.0)
            session.optimizer.zero_grad()
        state = session.module.state_dict()
        factor = math.inf if session.mesh.rank == 0 else 1.0
        session.backward(session.module(data(session.mesh.rank, 0)).square().mean() * factor)
        session.optimizer.step()
        assert session.optimizer.last_step_skipped and len(hook.norms) == STEPS + 1
        return hook.norms[:STEPS], state, norms


@pytest.mark.parametrize("name", SCALED)
def test_hooks_change_gradients_under_a_loss_scale(name: str) -> None:
    plan = SCALED[name]
    for ranks in (1, 2):
        expected, state = plain(ranks, plan.grad.max_norm)
        every = run_ranks(ranks, under_a_scale, plan)
        for norms, _, of_steps in every:
            assert norms == pytest.approx(expected, rel=1e-6)
            assert 0.0 < max(of_steps) < 0.05, "the norm of a step is that of what it applies"
        check([found for _, found, _ in every], state, f"{name}, {ranks} ranks", 1e-5 if plan.grad.max_norm else 1e-10)


def scale(optimizer: Any, factor: float) -> None:
    optimizer.param_groups[0]["params"][2].grad.mul_(factor)


def differing(plan: Plan) -> tuple[str, bool]:
    """Each rank scales by its own number in the hook."""
    model = seeded(net)
    optimizer = adam(model)
    with one_mesh(plan) as mesh:
        optimizer.register_step_pre_hook(lambda own, *_: scale(own, 1.0 + mesh.rank))
        with sharded(model, optimizer, plan, mesh) as session:
            before = session.module.state_dict()
            session.backward(session.module(data(mesh.rank, 0)).square().mean())
            message = told(session.optimizer.step)
            session.optimizer.zero_grad()
            after = session.module.state_dict()
            return message, all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("stage", "scaled"), [(2, True), (3, False), *full((1, False), (1, True), (2, False), (3, True))]
)
def test_what_hooks_do_is_compared_between_ranks(stage: int, scaled: bool) -> None:
    plan = zero(stage).but(scaler=SCALER if scaled else None)
    for message, same in run_ranks(2, differing, plan):
        assert "2.weight.grad was changed by different numbers on the ranks (rank 0 1, rank 1 2)" in message
        assert same


def norm_of(optimizer: Any) -> float:
    return float(clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9))


def with_closures(plan: Plan) -> tuple[list[str], list[float], dict[str, Tensor]]:
    """What is called, in which order; and gradients of a pass under ``no_sync()``, which a hook reads."""
    model = seeded(net)
    optimizer = adam(model)
    calls: list[str] = []
    norms: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with sharded(model, optimizer, plan) as session:

        def closure() -> Tensor:
            calls.append("closure")
            loss: Tensor = session.module(data(session.mesh.rank, 0)).square().mean()
            session.backward(loss)
            return loss.detach()

        session.optimizer.step(closure)
        session.optimizer.zero_grad()
        optimizer.register_step_pre_hook(lambda own, *_: norms.append(norm_of(own)))
        with session.no_sync():
            session.backward(session.module(data(session.mesh.rank, 1)).square().mean())
        session.optimizer.step()
        return calls, norms, session.module.state_dict()


def test_hooks_come_before_the_closure_and_see_what_is_reduced() -> None:
    for ranks in (1, 2):
        model, norms, calls = seeded(net), list[float](), list[str]()
        optimizer = adam(model)
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))  # type: ignore[misc]
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))  # type: ignore[misc]
        for step in range(2):

            def closure(step: int = step, model: nn.Module = model, ranks: int = ranks, calls: Any = calls) -> Any:
                calls.append("closure")
                losses = [model(data(rank, step)).square().mean() / ranks for rank in range(ranks)]
                for loss in losses:
                    loss.backward()
                return sum(losses)

            if step:
                closure(calls=[])
                norms.append(float(clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step(None if step else closure)
            optimizer.zero_grad()
        every = run_ranks(ranks, with_closures, zero(1))
        for found, seen, _ in every:
            assert found == calls == ["before", "closure", "after", "before", "after"]
            assert seen == pytest.approx(norms, rel=1e-9)
        check([state for *_, state in every], dict(model.state_dict()), f"{ranks} ranks")
