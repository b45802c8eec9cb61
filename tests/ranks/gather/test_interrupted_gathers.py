"""Ctrl-C anywhere while parameters are gathered, placed or evicted: what follows is right, and nothing stays held."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from engine_setup import adam, data, seeded, sharded
from interrupts import Interrupts
from sets import campaign, full
from tier_setup import with_tiers
from torch import Tensor, nn

from shardwise.build import Session
from shardwise.chunk import arrays, chunk
from shardwise.chunk.chunk import Residency
from shardwise.gather import hooks, policy, pool, rounds, turns
from shardwise.plan import ByTensor, Plan, zero
from shardwise.testing import run_ranks

WATCHED = [arrays, chunk, hooks, policy, pool, rounds, turns]


class Net(nn.Module):
    """Its third layer is used twice, and its last reads a parameter outside of its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[2]):
            x = torch.tanh(self.norm(layer(x)))
        return nn.functional.linear(x, self.layers[0].weight)


def one_pass(session: Session) -> Tensor:
    loss: Tensor = session.module(data(session.mesh.rank, 1)).square().mean()
    session.backward(loss)
    return loss.detach()


def evaluation(session: Session) -> Tensor:
    with torch.no_grad():
        loss: Tensor = session.module(data(session.mesh.rank, 1)).square().mean()
    return loss


def whole(session: Session) -> Tensor:
    with session.module.gathered():
        return torch.cat([param.detach().flatten() for param in session.module.parameters()]).clone()


DURING: dict[str, Callable[[Session], Tensor]] = {"pass": one_pass, "evaluation": evaluation, "gathered": whole}


def differs(session: Session, act: Callable[[Session], Tensor], loss: Tensor, grads: dict[str, Tensor]) -> str:
    """What is not as it would be without the interrupt, in words."""
    own, engine_pool = session.optimizers[0], session.engine.pool
    own.zero_grad()
    if not torch.equal(act(session), loss):
        return "another value"
    own.zero_grad()
    one_pass(session)
    found = session.full_gradients()
    if found.keys() != grads.keys() or not all(torch.equal(found[name], grads[name]) for name in grads):
        return "other gradients"
    if pinned := [unit for unit, pins in engine_pool._pins.items() if pins]:
        return f"units {pinned} stay pinned"
    own.zero_grad()
    gc.collect()
    engine_pool.drop_changed()
    engine_pool.invalidate(True)
    if lost := [c.spec.index for c in engine_pool.chunks if not c.resident and c.state is not Residency.SHARDED]:
        return f"chunks {lost} stay gathered"
    if engine_pool.gathered_bytes or engine_pool.copied_bytes:
        return f"{engine_pool.gathered_bytes} and {engine_pool.copied_bytes} bytes count as gathered"
    return ""


def interrupted(plan: Plan, during: str, tries: int) -> tuple[int, list[str]]:
    inside, act, net, wrong = Interrupts(WATCHED), DURING[during], seeded(Net), list[str]()
    with sharded(net, adam(net), plan) as session:
        one_pass(session)
        session.optimizers[0].step()
        one_pass(session)
        grads = session.full_gradients()
        session.optimizers[0].zero_grad()
        like = act(session)
        inside.run(lambda: act(session))
        points = inside.passed
        for at in range(0, points, max(points // tries, 1) if tries else 1):
            came = inside.run(lambda: act(session), at)
            here = f"{inside.where} (point {at} of {points}): "
            if not came and inside.where:
                wrong.append(here + "the interrupt did not come out")
                continue
            try:
                what = differs(session, act, like, grads)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
            if what:
                wrong.append(here + what)
    return points, wrong


# On one rank, whose parameters are on the host: what peers do then is tried in test_failed_passes.
PLANS: dict[str, Plan] = {
    "module": with_tiers(zero(3), "all_host", "unused"),
    "tensor": with_tiers(zero(3).but(packing=ByTensor(persist_numel=0), gathered_fraction=0.4), "all_host", "unused"),
    "ahead": with_tiers(zero(3).but(packing=ByTensor(persist_numel=0), prefetch=2), "all_host", "unused"),
}


CASES = [(tries, name, during) for tries in (10, 0) for name in PLANS for during in DURING]
FEW = [(10, name, during) for name, during in zip(PLANS, DURING, strict=True)]


@pytest.mark.parametrize(
    ("tries", "name", "during"),
    [*FEW, *full(*(case for case in CASES if case[0] and case not in FEW)), *campaign(*CASES[len(CASES) // 2 :])],
)
def test_an_interrupted_gather_is_finished_or_undone(during: str, name: str, tries: int) -> None:
    ((points, wrong),) = run_ranks(1, interrupted, PLANS[name], during, tries, timeout=60.0 if tries else 3600.0)
    assert points > 80
    assert not wrong, "\n".join([f"{len(wrong)} times:", *wrong[:20]])
