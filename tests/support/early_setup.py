"""Setup for tests of ``update="backward"``: cases, a training loop, and the comparison."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardwise.core.mesh import Mesh
from shardwise.core.update.optimizer_in_backward import EarlyUpdates
from shardwise.plan import Plan, TierPlan, on_device, zero
from shardwise.session import Session
from tests.support.engine_setup import OwnOptimizer, one_mesh, sharded
from tests.support.models import MODELS, make_batches
from tests.support.tier_setup import digest, small_tiles

HOST = dataclasses.replace(on_device(), state_host_fraction=1.0)
MIX = dataclasses.replace(on_device(), state_host_fraction=0.5, param_host_fraction=0.5)


class Nested(OwnOptimizer):
    """Momentum in a nested list, gradients changed in place, and a count that is a plain number."""

    def update(self, param: Any, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["count"] = state.get("count", 0) + 1
        state["history"] = [*state.get("history", [0.0]), state["count"] * 0.5][-3:]
        param.grad.mul_(1.0 + 0.1 * state["history"][-1])
        param.add_(param.grad, alpha=-group["lr"] / state["count"])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "user": lambda p: Nested(p, lr=0.02),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
}


@dataclass
class Case:
    """One training run."""

    stage: int = 3
    tiers: TierPlan = field(default_factory=on_device)
    model: str = "residual"
    optimizer: str = "adamw"
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int = 4

    def plan(self, shared: bool | None) -> Plan:
        dtype = self.changes.get("param_dtype")
        plan = zero(self.stage, dtype)  # type: ignore[arg-type]
        more: dict[str, Any] = {} if dtype is None else {"buffer_dtype": dtype, "cast_inputs": True}
        if self.model == "mixture":  # ranks use different experts
            more["same_order"] = False
        return plan.but(tiers=self.tiers, shared_memory=shared, **more, **self.changes)


@dataclass
class Seen:
    """Results of one run of a case on a rank."""

    state: str
    losses: list[float]
    norms: list[float]
    updates: int


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the chunks that were updated early."""
    counts, update = {"updates": 0}, EarlyUpdates.update

    def counted(self: EarlyUpdates, *args: Any) -> None:
        counts["updates"] += 1
        update(self, *args)

    with mock.patch.object(EarlyUpdates, "update", counted):
        yield counts


def full_state(session: Session) -> str:
    """Return a digest of masters and optimizer state. Collective."""
    return digest([session.module.state_dict(), [each.state_dict() for each in session.optimizers]])


def train(case: Case, plan: Plan, mesh: Mesh) -> Seen:
    kind = MODELS[case.model]
    model = kind.factory(torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses, norms = [], []
    batches = make_batches(kind, mesh.size, case.steps, 1)
    tiles = small_tiles(200 if case.model == "gpt" else 60)
    with tiles, counting() as counts, sharded(model, OPTIMIZERS[case.optimizer](trained), plan, mesh) as session:
        own = session.optimizers[0]
        for (micro,) in batches:
            loss = kind.loss(session.module, micro[mesh.rank])
            session.backward(loss)
            losses.append(float(loss.detach()))
            own.step()
            own.zero_grad()
            norms.append(float(own.get_grad_norm()))  # type: ignore[arg-type]
        return Seen(full_state(session), losses, norms, **counts)


def both(cases: list[Case], shared: bool | None) -> list[tuple[Seen, Seen]]:
    """Run every case on this rank: on the device with updates in ``step()``, and in its tiers during backward."""
    with one_mesh(zero(3).but(shared_memory=shared)) as mesh:
        pairs = []
        for case in cases:
            plan = case.plan(shared)
            ways = plan.but(tiers=on_device()), plan.but(update="backward")
            pairs.append((train(case, ways[0], mesh), train(case, ways[1], mesh)))
        return pairs


def check_equal(ranks: list[list[tuple[Seen, Seen]]], cases: list[Case]) -> None:
    for index, case in enumerate(cases):
        for rank, pairs in enumerate(ranks):
            plain, early = pairs[index]
            where = f"{case} on rank {rank}"
            assert early.state == plain.state, where
            assert early.losses == plain.losses, where
            for ours, theirs in zip(early.norms, plain.norms, strict=True):
                assert abs(ours - theirs) <= 1e-6 * theirs, f"{where}: {early.norms} instead of {plain.norms}"
            assert plain.updates == 0
        assert sum(pairs[index][1].updates for pairs in ranks), f"{case}: nothing was updated early"
