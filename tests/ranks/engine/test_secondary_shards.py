"""Secondary shards (hpZ of ZeRO++): gathers that are made of them give plain PyTorch's numbers, whatever changes
parameters in between; what they hold and what each group sends, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from uses_setup import PROGRAMS, STEPS, Experts, expected, mean_square, plan_for

from shardwise.core.mesh import Mesh
from shardwise.plan import ByTensor, MeshPlan, Plan, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import adam, check, meshes, run_sharded, seeded, sgd, sharded
from tests.support.sets import full

GLOO = zero(3).but(shared_memory=False)
NAMES = list(PROGRAMS)


Cases = list[tuple[Plan, list[str]]]


def programs(cases: Cases) -> list[dict[str, dict[str, Tensor]]]:
    with meshes() as mesh_of:
        return [
            {name: run_sharded(Experts, PROGRAMS[name], plan_for(name, plan), STEPS, mesh_of(plan)) for name in names}
            for plan, names in cases
        ]


FOUR: Cases = [(GLOO.but(secondary=2), NAMES[::2]), (zero(3).but(secondary=2, prefetch=0), NAMES[1::3])]
TWO: Cases = [
    (zero(3).but(secondary=1), NAMES),
    (GLOO.but(secondary=1, packing=ByTensor(persist_numel=7), prefetch=2), NAMES[2::3]),
]


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), *full((4, FOUR))])
def test_programs(ranks: int, cases: Cases) -> None:
    """Every way to use a model, other blocks on every rank among them."""
    results = run_ranks(ranks, programs, cases)
    for index, (_, names) in enumerate(cases):
        for name in names:
            check([result[index][name] for result in results], expected(ranks, name), f"{name}, case {index}")


class Life(nn.Module):
    """An embedding tied to its head, a frozen block, and one whose activations are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.blocks[0](x)
        x = checkpoint(self.blocks[2], self.blocks[1](x), use_reentrant=False)
        return self.head(x)


def tokens(rank: int, step: int) -> Tensor:
    return (torch.arange(8) * (2 + rank) + 3 * step) % 11


class Plainly:
    """What :func:`live` does to a session, done to a plain model in one process."""

    def __init__(self, ranks: int) -> None:
        self.module, self._ranks = seeded(Life), ranks
        self._optimizer = adam(self.module)

    def train(self, step: int) -> None:
        for micro in range(2):
            for rank in range(self._ranks):
                (mean_square(self.module(tokens(rank, step + micro))) / self._ranks).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def write(self, scale: float) -> None:
        with torch.no_grad():
            for param in self.module.parameters():
                param.mul_(scale)

    def set(self, value: Tensor) -> None:
        with torch.no_grad():
            self.module.blocks[0][0].weight.copy_(value)


class Sharded(Plainly):
    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        model = seeded(Life)
        self.session = build(model, adam(model), plan, mesh)
        self.module = self.session.module  # type: ignore[assignment]
        self._first = model.blocks[0][0].weight

    def train(self, step: int) -> None:
        for micro in range(2):
            self.session.backward(mean_square(self.module(tokens(self.session.mesh.rank, step + micro))))
        self.session.optimizer.step()

    def write(self, scale: float) -> None:
        with self.session.module.gathered(write_back=True):
            super().write(scale)

    def set(self, value: Tensor) -> None:
        one = self.session.one(self._first)
        one.set_value(value)


def live(one: Plainly) -> dict[str, Tensor]:
    """Each way to change parameters, a look at the model before and after each (``look 0`` to ``look 7``), and its last
    state."""
    seen: dict[str, Tensor] = {}

    def look() -> None:
        with torch.no_grad():
            seen[f"look {len(seen)}"] = one.module(tokens(0, 99))

    before = {name: value.clone() for name, value in one.module.state_dict().items()}
    changes: list[Callable[[], object]] = [
        lambda: one.train(0),
        lambda: one.write(1.25),
        lambda: one.train(2),
        lambda: one.set(torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)),
        lambda: one.train(4),
        lambda: one.module.load_state_dict(before),
        lambda: one.train(6),
    ]
    for change in changes:
        look()
        change()
    look()
    return seen | one.module.state_dict()


def lives(plans: list[Plan], directory: Path) -> list[dict[str, Tensor]]:
    """The last one's checkpoint is read by a session without secondary shards."""
    found = []
    with meshes() as mesh_of:
        for plan in plans:
            one = Sharded(plan, mesh_of(plan))
            found.append(live(one))
            one.session.checkpoints.save(directory / "last")
            one.session.close()
        other = Sharded(plan.but(secondary=None), mesh_of(plan))
        other.session.checkpoints.load(directory / "last")
        found.append(other.module.state_dict())
        other.session.close()
    return found


def test_whatever_changes_parameters_is_seen(tmp_path: Path) -> None:
    wanted = live(Plainly(4))
    looks = [value for name, value in wanted.items() if name.startswith("look")]
    assert len(looks) == 8 and not any(torch.equal(one, other) for one, other in pairwise(looks))
    plans = [GLOO.but(secondary=2), zero(3).but(secondary=2, gathered_fraction=0.3), GLOO.but(secondary=1)]
    for *results, loaded in run_ranks(4, lives, plans, tmp_path):
        for plan, found in zip(plans, results, strict=True):
            assert_close(found, wanted, 1e-11, f"{plan.mesh}")
        assert all(torch.equal(value, results[-1][name]) for name, value in loaded.items())


# ---- what they hold, and what each group sends

WIDTH, DEPTH = 16, 5


def chain(freeze: int = 0) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    model[:freeze].requires_grad_(False)
    return model


def passes(session: Session, count: int) -> None:
    for _ in range(count):
        session.backward(session.module(torch.randn(3, WIDTH, requires_grad=True)).square().mean())


def evaluated(session: Session, count: int) -> None:
    with torch.no_grad():
        for _ in range(count):
            session.module(torch.randn(3, WIDTH))


def sent(session: Session) -> tuple[int, int]:
    """Bytes of gathers since the last call, of the whole group and of the secondary one."""
    mesh = session.mesh
    found = mesh.shard.traffic.bytes["all_gather"], mesh.secondary.traffic.bytes["all_gather"] if mesh.secondary else 0
    assert sum(found) == session.traffic()["all_gather"]
    session.reset_traffic()
    return found


def counted(plans: list[Plan]) -> list[dict[str, Any]]:
    found = []
    with meshes() as mesh_of:
        for plan in plans:
            model = chain(freeze=1)
            with sharded(model, sgd(model), plan, mesh_of(plan)) as session:
                told: dict[str, Any] = {"unit": session.engine.shards.layout.chunks[1].padded_bytes}
                assert {c.padded_bytes for c in session.engine.shards.layout.chunks} == {told["unit"]}
                session.reset_traffic()
                passes(session, 1)
                told["first pass"] = sent(session)
                passes(session, 2)
                told["two more"] = sent(session)
                evaluated(session, 1)
                told["evaluation"] = sent(session)
                session.optimizer.step()
                passes(session, 1)
                told["after a step"] = sent(session)
                session.optimizer.step()
                evaluated(session, 2)
                told["evaluations after a step"] = sent(session)
                passes(session, 1)
                told["and a pass"] = sent(session)
                with session.module.gathered(write_back=True):
                    sent(session)
                evaluated(session, 1)
                told["written"] = sent(session)
                if session.mesh.rank == 0 and session.mesh.secondary is not None:  # as an interrupt would leave it
                    session.engine.shards.chunks[2].source.forget()
                evaluated(session, 1)
                told["ranks that differ"] = sent(session)
                memory = session.memory()
                told["kept"] = memory.secondary_bytes, memory.total_bytes - memory.copied_bytes - memory.idle_bytes
            found.append(told)
    return found


@pytest.mark.parametrize(("ranks", "size", "shared"), [(4, 2, False), *full((4, 2, None), (4, 1, False), (2, 1, None))])
def test_bytes_of_each_group(ranks: int, size: int, shared: bool | None) -> None:
    """Of K = 5 units of B bytes, one of them frozen, with N ranks and secondary groups of k: the first pass after an
    update sends (N-1)/N B for each unit among all, which frozen ones are kept through; every other gather sends (k-1)/k
    B. A unit that is there at the turn is not gathered: the last of a forward pass, the first of a backward pass."""
    # Ranks that differ find that where they agree on gathers.
    plan = zero(3, torch.bfloat16).but(prefetch=0, shared_memory=shared, secondary=size, same_order=False)
    without = plan.but(secondary=None)
    for kept, bare in run_ranks(ranks, counted, [plan, without]):
        unit = kept["unit"]
        whole, part = unit * (ranks - 1) // ranks, unit * (size - 1) // size
        assert kept["first pass"] == (DEPTH * whole, (DEPTH - 1) * part)
        assert kept["two more"] == (0, 2 * 2 * (DEPTH - 1) * part)
        assert kept["evaluation"] == (0, (DEPTH - 1) * part)
        # Of the frozen unit, too, but among the few.
        assert kept["after a step"] == ((DEPTH - 1) * whole, DEPTH * part)
        assert kept["evaluations after a step"] == ((DEPTH - 1) * whole, (1 + DEPTH - 1) * part)
        assert kept["and a pass"] == (0, (DEPTH + DEPTH - 1) * part)  # the last was there, which goes first
        assert kept["written"] == (DEPTH * whole, 0)
        assert kept["ranks that differ"] == (DEPTH * whole, 0)
        # Half precision: 1/k of the parameters.
        held, total = kept["kept"]
        assert held == DEPTH * unit // size and bare["kept"] == (0, total - held)
        assert bare["first pass"] == ((2 * DEPTH - 1) * whole, 0)


def groups(plan: MeshPlan) -> list[int]:
    mesh = Mesh.create(plan, torch.device("cpu"), GLOO.comm)
    found = [int(row[0]) for row in mesh.secondary.exchange([mesh.mesh_group.rank])]
    mesh.close()
    return found


def test_neighbours_keep_them_together() -> None:
    found = run_ranks(4, groups, MeshPlan(dp_shard=-1, dp_replicate=1, secondary=2))
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]
    found = run_ranks(8, groups, MeshPlan(dp_shard=-1, dp_replicate=1, tp=2, secondary=2))
    assert found == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
