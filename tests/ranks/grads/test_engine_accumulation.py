"""Gradient accumulation and clipping, compared with one large batch, as :class:`GradPlan` documents them.

Covers dropped passes, ``no_sync``, ``average="tokens"``, ``clip_grad_by_norm`` and ``accumulate_dtype``.
"""

import math
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, replicated, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, check, one_mesh, plain_steps, seeded, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

RANKS, MICRO, STEPS = 2, 3, 2
# Rows of each rank's micro-batches: deliberately uneven, and one of them is empty.
ROWS = [[1, 5, 2], [7, 0, 3]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def rows(rank: int, micro: int, step: int, even: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4 if even else ROWS[rank][micro], 4, generator=generator, dtype=torch.float64)


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean over the rows; zero if there are none."""
    return model(x).square().sum() / max(len(x), 1)


def _drop(session: Session, how: str, weight: float | None) -> None:
    """Run a pass whose gradients are dropped before the step."""
    x = rows(session.mesh.rank, 0, 9, True)
    with session.no_sync() if how == "no_sync" else nullcontext():
        session.backward(100 * mean_loss(session.module, x), tokens=weight)
    if how == "module":
        session.module.zero_grad()
    elif how == "failed":
        x.requires_grad_().register_hook(_fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            session.backward(mean_loss(session.module, x), tokens=weight)
    else:
        session.optimizer.zero_grad()


def _fail(_: Tensor) -> None:
    raise RuntimeError("on purpose")


def of_all_rows(even: bool) -> dict[str, Tensor]:
    """Return the state after plain steps; each step takes the mean over the rows of all ranks and passes."""
    model = seeded(net)

    def loss(model: nn.Module, _rank: int, step: int) -> Tensor:
        return mean_loss(model, torch.cat([rows(r, m, step, even) for r in range(RANKS) for m in range(MICRO)]))

    return plain_steps(model, sgd(model), STEPS, loss, ranks=1)


@pytest.mark.parametrize("name", ["zero1", "zero3", *full("ddp", "zero2")])
@on_ranks(RANKS)
def test_dropped_passes_are_not_counted(name: str) -> None:
    """Gradients of dropped passes, their number and their tokens do not enter the step that follows."""
    plan, hows = PLANS[name], ["optimizer", "module", "failed", *(["no_sync"] if name in ("ddp", "zero1") else [])]
    with one_mesh(plan) as mesh:
        for average, how in product(("mean", "tokens"), hows):
            model = seeded(net)
            with sharded(model, sgd(model), plan.but(average=average), mesh) as session:
                for step in range(STEPS):
                    _drop(session, how, 7.0 if average == "tokens" else None)
                    for micro in range(MICRO):
                        x = rows(session.mesh.rank, micro, step, average == "mean")
                        loss = mean_loss(session.module, x)
                        session.backward(loss, tokens=float(len(x)) if average == "tokens" else None)
                    session.optimizer.step()
                check([session.module.state_dict()], of_all_rows(average == "mean"), f"{name} {average} {how}")


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@on_ranks(RANKS)
def test_clip_grad_by_norm(name: str) -> None:
    plain = seeded(net)
    mean_loss(plain, torch.cat([rows(r, 0, 0, True) for r in range(RANKS)])).backward()
    before = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.25))
    nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    model = seeded(net)
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), PLANS[name]) as session:
        session.backward(mean_loss(session.module, rows(session.mesh.rank, 0, 0, True)))
        assert session.optimizer.clip_grad_by_norm(0.25) == pytest.approx(before, rel=1e-12) and before > 0.25
        assert session.optimizer.clip_grad_by_norm(0.25) == pytest.approx(0.25, rel=1e-5)
        for bad in (0.0, -1.0, math.nan):
            raises(ValueError, f"^max_norm={bad}:", session.optimizer.clip_grad_by_norm, bad)
        loss = mean_loss(session.module, rows(session.mesh.rank, 0, 1, True))
        raises(ValueError, "tokens=7.0", session.backward, loss, tokens=7.0)
        session.optimizer.step()
        assert session.optimizer.get_grad_norm() == pytest.approx(before, rel=1e-12)
        check([session.module.state_dict()], dict(plain.state_dict()), name)


@pytest.mark.parametrize(
    ("average", "name"), [("sum", "ddp"), ("mean", "zero1"), *full(("mean", "ddp"), ("sum", "zero1"))]
)
@on_ranks(RANKS)
def test_step_reduces_gradients_of_no_sync_passes(name: str, average: str) -> None:
    """Running all passes under ``no_sync`` gives the same step as running all but the last under it."""
    plan, found = PLANS[name].but(average=average), []
    with one_mesh(plan) as mesh:
        for synced in (MICRO, MICRO - 1):
            model = seeded(net)
            norms = []
            with sharded(model, adam(model), plan, mesh) as session:
                for step in range(STEPS):
                    for micro in range(MICRO):
                        loss = mean_loss(session.module, rows(mesh.rank, micro, step, True))
                        with session.no_sync() if micro != synced else nullcontext():
                            session.backward(loss)
                    session.optimizer.step()
                    norms.append(session.optimizer.get_grad_norm())
                found.append((session.module.state_dict(), norms))
    (state, norms), (expected, others) = found
    assert norms == pytest.approx(others, rel=1e-12)
    check([state], expected, "state")


def _around(session: Session, loss: Tensor) -> None:
    with session.backward_pass():
        loss.backward()


def _expected(session: Session, loss: Tensor) -> None:
    session.expect_backward(1.0)
    loss.backward()


WITHOUT_TOKENS = (lambda session, loss: loss.backward(), _around, _expected)


@pytest.mark.parametrize("name", ["ddp", *full("zero1"), *full("zero2"), "zero3"])
@on_ranks(RANKS)
def test_pass_without_tokens_is_an_error_under_average_tokens(name: str) -> None:
    """A pass without tokens raises after a pass with tokens; training after the error is right."""
    model = seeded(net)
    with sharded(model, sgd(model), PLANS[name].but(average="tokens")) as session:
        for make in (*WITHOUT_TOKENS, lambda session, loss: session.backward(loss)):
            session.backward(mean_loss(session.module, rows(session.mesh.rank, 0, 9, True)), tokens=7.0)
            loss = mean_loss(session.module, rows(session.mesh.rank, 1, 9, True))
            said = raises((RuntimeError, ValueError), None, make, session, loss)
            if make in WITHOUT_TOKENS:
                assert "session.backward(loss, tokens=...)" in said and "average='tokens'" in said
            else:
                assert "tokens=None" in said
            session.optimizer.zero_grad()
        for step in range(STEPS):
            for micro in range(MICRO):
                x = rows(session.mesh.rank, micro, step, False)
                session.backward(mean_loss(session.module, x), tokens=float(len(x)))
            session.optimizer.step()
        check([session.module.state_dict()], of_all_rows(False), name)


HALF, FIRST, NUMEL = torch.bfloat16, 256.0, 192
DTYPE_PLANS = {"ddp": replicated(HALF), "zero1": zero(1, HALF), "zero2": zero(2, HALF)}
# The sum of a rank's passes can be represented in bf16, which is sent, but adding them one by one in bf16 misses it.
SLOPES = (1.0, 2.0)
DTYPE_STEPS = ([65], [33, 33], [1, 65])
"""For each step, the numbers of passes up to each reduction; the first pass has a far larger gradient."""


class Sum(nn.Module):
    """A module whose loss has the gradient ``slope`` for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.zeros(NUMEL)), nn.Parameter(torch.zeros(7))

    def forward(self, slope: float) -> Tensor:
        return ((self.weight.sum() + self.other.sum()) * slope).float()


def window(session: Session, passes: int) -> None:
    """Run the passes of a window; the last one alone is reduced where gradients are unsharded."""
    for left in reversed(range(passes)):
        with session.no_sync() if left and session.plan.shard.reduce == "last" else nullcontext():
            session.backward(session.module(SLOPES[session.mesh.rank] * (FIRST if left + 1 == passes else 1.0)))


def all_alike(found: dict[str, Tensor]) -> float:
    values = {float(each) for tensor in found.values() for each in (tensor.min(), tensor.max())}
    assert len(values) == 1
    return values.pop()


def trained(plan: Plan, mesh: Mesh) -> tuple[list[float], dict[str, int]]:
    """Return the gradients of three steps and the final weights, and the bytes sent in a step of two reduced passes."""
    model, found = Sum(), []
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, mesh) as session:
        for windows in DTYPE_STEPS:
            session.reset_traffic()
            for passes in windows:
                window(session, passes)
            sent = session.traffic()
            found.append(all_alike(session.full_gradients()))
            session.optimizer.step()
            session.optimizer.zero_grad()
        return [*found, all_alike(session.module.state_dict())], sent


def memory(plan: Plan, mesh: Mesh) -> tuple[list[int], int, int]:
    """Return gradient bytes after steps of one and of several passes, and the numbers of unsharded and sharded
    elements."""
    model, found = Sum(), []
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, mesh) as session:
        for passes in (1, 3, 1):
            window(session, passes)
            session.optimizer.step()
            session.optimizer.zero_grad()
            found.append(session.memory().gradients_bytes)
        chunks = session._engine.shards.chunks
        return found, sum(c.spec.padded_numel for c in chunks), sum(c.shard_numel for c in chunks)


def measured(name: str) -> dict[Any, Any]:
    plan, found = DTYPE_PLANS[name], {}
    with one_mesh(plan) as mesh:
        for dtype in (None, torch.float32):
            chosen = plan.but(accumulate_dtype=dtype)
            found[dtype] = (*trained(chosen, mesh), memory(chosen, mesh))
    return found


@pytest.mark.parametrize("name", [*full("ddp"), "zero1", *full("zero2")])
def test_passes_add_up_in_accumulate_dtype(name: str) -> None:
    for ranks in (1, 2):
        mean = sum(SLOPES[:ranks]) / ranks
        for found in run_ranks(ranks, measured, name):
            (half, sent_half, (_, _, _)), (wide, sent, _) = found[None], found[torch.float32]
            sums = [mean * sum(FIRST + passes - 1 for passes in windows) for windows in DTYPE_STEPS]
            assert wide == [*sums, -sum(sums)]
            assert half[0] != wide[0] and sent == sent_half


def test_accumulate_dtype_takes_memory_with_several_passes_only() -> None:
    for name in ("ddp", "zero1"):
        for found in run_ranks(2, measured, name):
            (before, whole, shard), (after, _, _) = found[None][2], found[torch.float32][2]
            more = [b - a for a, b in zip(before, after, strict=True)]
            assert more == [4 * shard, 4 * shard + 4 * whole, 4 * shard + 4 * whole]
