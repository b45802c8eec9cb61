"""Step pre-hooks run where torch runs them: before the closure, and before gradients and rates are used."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import SCALER, check, mean_square, plain_steps, seeded, sharded
from tests.support.engine_setup import tanh_net as net
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.steps import take_steps

STEPS = 3
SCALED = {
    "zero1": zero(1).but(scaler=SCALER),
    "zero3": zero(3).but(scaler=SCALER),
    "zero2_clipped": zero(2).but(scaler=SCALER, max_norm=0.02),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)


class Hook:
    """A hook that halves the rate, clips, and subtracts the mean of each gradient."""

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
    """Train with a fourth step that overflows and is skipped."""
    model, hook = seeded(net), Hook()
    optimizer = adam(model)
    optimizer.register_step_pre_hook(hook)
    with sharded(model, optimizer, plan) as session:
        norms = []
        for step in range(STEPS):
            take_steps(session, [step])
            norms.append(session.optimizer.get_grad_norm() or 0.0)
        state = session.module.state_dict()
        factor = math.inf if session.mesh.rank == 0 else 1.0
        take_steps(session, [0], lambda model, rank, step: mean_square(model, rank, step) * factor)
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


@pytest.mark.parametrize(
    ("stage", "scaled"), [(2, True), (3, False), *full((1, False), (1, True), (2, False), (3, True))]
)
@on_ranks(2)
def test_gradients_that_hooks_change_are_compared_between_ranks(stage: Any, scaled: bool) -> None:
    """In the hook, each rank scales by its own factor."""
    model = seeded(net)
    optimizer = adam(model)
    optimizer.register_step_pre_hook(lambda own, *_: scale(own, 1.0 + dist.get_rank()))
    with sharded(model, optimizer, zero(stage).but(scaler=SCALER if scaled else None)) as session:
        before = session.module.state_dict()
        session.backward(mean_square(session.module, session.mesh.rank, 0))
        words = r"2\.weight\.grad was changed by different numbers on the ranks \(rank 0 1, rank 1 2\)"
        raises(RuntimeError, words, session.optimizer.step)
        session.optimizer.zero_grad()
        assert_close(session.module.state_dict(), before, 0.0, "after a step that was refused")


def norm_of(optimizer: Any) -> float:
    return float(clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9))


Seen = tuple[list[str], list[float], dict[str, Tensor]]


def hooked_steps(module: nn.Module, given: Any, own: Any, backward: Callable[[int], Tensor]) -> Seen:
    """Run a step with a closure, and one after a pass under ``no_sync()`` whose gradients a hook reads; return the
    calls."""
    calls, norms = list[str](), list[float]()
    given.register_step_pre_hook(lambda *_: calls.append("before"))
    given.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        return backward(0)

    own.step(closure)
    own.zero_grad()
    given.register_step_pre_hook(lambda optimizer, *_: norms.append(norm_of(optimizer)))
    backward(1)
    own.step()
    return calls, norms, dict(module.state_dict())


def with_closures(plan: Plan) -> Seen:
    model = seeded(net)
    optimizer = adam(model)
    with sharded(model, optimizer, plan) as session:

        def backward(step: int) -> Tensor:
            loss = mean_square(session.module, session.mesh.rank, step)
            with session.no_sync() if step else nullcontext():
                session.backward(loss)
            return loss.detach()

        return hooked_steps(session.module, optimizer, session.optimizer, backward)


def plainly_with_closures(ranks: int) -> Seen:
    model = seeded(net)
    optimizer = adam(model)

    def backward(step: int) -> Tensor:
        loss = torch.stack([mean_square(model, rank, step) for rank in range(ranks)]).mean()
        loss.backward()
        return loss.detach()

    return hooked_steps(model, optimizer, optimizer, backward)


def test_hooks_run_before_the_closure_and_see_reduced_gradients() -> None:
    for ranks in (1, 2):
        calls, norms, expected = plainly_with_closures(ranks)
        assert calls == ["before", "closure", "after", "before", "after"]
        for found, seen, state in run_ranks(ranks, with_closures, zero(1)):
            assert found == calls and seen == pytest.approx(norms, rel=1e-9)
            check([state], expected, f"{ranks} ranks")
