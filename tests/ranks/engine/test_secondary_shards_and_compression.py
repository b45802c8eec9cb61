"""Secondary shards (hpZ of ZeRO++), and training with compressed communication.

* Gathers from secondary shards give plain PyTorch's numbers whatever changes parameters; their memory and the traffic
  of each group equal the formulas to the byte.
* Compression: equal bits over all transports, errors within the documented bounds, masters that are never rounded, and
  traffic equal to the formula.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.comm import BLOCK, FORMATS
from shardwise.core.mesh import Mesh
from shardwise.plan import ByNumel, MeshPlan, Plan, on_device, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.checkpoint_setup import tiers
from tests.support.engine_setup import adam, chain, meshes, one_mesh, seeded, sgd, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

GLOO = zero(3).but(shared_memory=False)


class Life(nn.Module):
    """An embedding tied to its head, a frozen block, and a checkpointed block."""

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
    """The operations of :func:`live` on a plain model in one process."""

    def __init__(self, ranks: int) -> None:
        self.module, self._ranks = seeded(Life), ranks
        self._optimizer = adam(self.module)

    def train(self, step: int) -> None:
        for micro in range(2):
            for rank in range(self._ranks):
                (self.module(tokens(rank, step + micro)).square().mean() / self._ranks).backward()
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
            self.session.backward(self.module(tokens(self.session.mesh.rank, step + micro)).square().mean())
        self.session.optimizer.step()

    def write(self, scale: float) -> None:
        with self.session.module.gathered(write_back=True):
            super().write(scale)

    def set(self, value: Tensor) -> None:
        one = self.session.one(self._first)
        one.set_value(value)


def live(one: Plainly) -> dict[str, Tensor]:
    """Apply each kind of change to the parameters, with an evaluation before and after it (``look 0`` to ``look 7``).

    Return the evaluations and the last state.
    """
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


@on_ranks(4)
def test_secondary_shards_follow_changes_of_parameters(tmp_path: Path) -> None:
    """A session without secondary shards reads the last checkpoint."""
    wanted = live(Plainly(4))
    looks = [value for name, value in wanted.items() if name.startswith("look")]
    assert len(looks) == 8 and not any(torch.equal(one, other) for one, other in pairwise(looks))
    with meshes() as mesh_of:
        for plan in (GLOO.but(secondary=2), zero(3).but(secondary=2, gathered_fraction=0.3), GLOO.but(secondary=1)):
            one = Sharded(plan, mesh_of(plan))
            found = live(one)
            assert_close(found, wanted, 1e-11, f"{plan.mesh}")
            one.session.checkpoints.save(tmp_path / "last")
            one.session.close()
        other = Sharded(plan.but(secondary=None), mesh_of(plan))
        other.session.checkpoints.load(tmp_path / "last")
        assert all(torch.equal(value, found[name]) for name, value in other.module.state_dict().items())
        other.session.close()


# ---- memory of secondary shards, and traffic of each group

WIDTH, DEPTH = 16, 5


def passes(session: Session, count: int) -> None:
    for _ in range(count):
        session.backward(session.module(torch.randn(3, WIDTH, requires_grad=True)).square().mean())


def evaluated(session: Session, count: int) -> None:
    with torch.no_grad():
        for _ in range(count):
            session.module(torch.randn(3, WIDTH))


def sent(session: Session) -> tuple[int, int]:
    """Return the bytes gathered since the last call, by the full group and by the secondary one."""
    mesh = session.mesh
    found = mesh.shard.traffic.bytes["all_gather"], mesh.secondary.traffic.bytes["all_gather"] if mesh.secondary else 0
    assert sum(found) == session.traffic()["all_gather"]
    session.reset_traffic()
    return found


def counted(plans: list[Plan]) -> list[dict[str, Any]]:
    found = []
    with meshes() as mesh_of:
        for plan in plans:
            model = chain(WIDTH, DEPTH, freeze=1)
            with sharded(model, sgd(model), plan, mesh_of(plan)) as session:
                told: dict[str, Any] = {"unit": session._engine.shards.layout.chunks[1].padded_bytes}
                assert {c.padded_bytes for c in session._engine.shards.layout.chunks} == {told["unit"]}
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
                if session.mesh.rank == 0 and session.mesh.secondary is not None:  # as after an interrupt
                    session._engine.shards.chunks[2].source.forget()
                evaluated(session, 1)
                told["ranks that differ"] = sent(session)
                memory = session.memory()
                told["kept"] = memory.secondary_bytes, memory.total_bytes - memory.copied_bytes - memory.idle_bytes
            found.append(told)
    return found


@pytest.mark.parametrize(("ranks", "size", "shared"), [(4, 2, False), *full((4, 2, None), (4, 1, False), (2, 1, None))])
def test_bytes_of_each_group(ranks: int, size: int, shared: bool | None) -> None:
    """The formulas have K = 5 units of B bytes, one of them frozen, N ranks, and secondary groups of k ranks.

    The first gather of a unit after an update sends (N-1)/N B over all ranks, and frozen units need it only once; every
    other gather sends (k-1)/k B. A unit that is still gathered is not gathered again: the last one after a forward
    pass, and the first one after a backward pass.
    """
    # With same_order=False, ranks agree before a gather, and so detect that one has no secondary shard.
    plan = zero(3, torch.bfloat16).but(prefetch=0, shared_memory=shared, secondary=size, same_order=False)
    without = plan.but(secondary=None)
    for kept, bare in run_ranks(ranks, counted, [plan, without]):
        unit = kept["unit"]
        whole, part = unit * (ranks - 1) // ranks, unit * (size - 1) // size
        assert kept["first pass"] == (DEPTH * whole, (DEPTH - 1) * part)
        assert kept["two more"] == (0, 2 * 2 * (DEPTH - 1) * part)
        assert kept["evaluation"] == (0, (DEPTH - 1) * part)
        # The secondary group gathers the frozen unit, too.
        assert kept["after a step"] == ((DEPTH - 1) * whole, DEPTH * part)
        assert kept["evaluations after a step"] == ((DEPTH - 1) * whole, (1 + DEPTH - 1) * part)
        assert kept["and a pass"] == (0, (DEPTH + DEPTH - 1) * part)  # one unit is still gathered
        assert kept["written"] == (DEPTH * whole, 0)
        assert kept["ranks that differ"] == (DEPTH * whole, 0)
        # Secondary shards have 1/k of the 16-bit parameters.
        held, total = kept["kept"]
        assert held == DEPTH * unit // size and bare["kept"] == (0, total - held)
        assert bare["first pass"] == ((2 * DEPTH - 1) * whole, 0)


@pytest.mark.parametrize(("ranks", "tp"), [(4, 1), (8, 2)])
@on_ranks()
def test_secondary_groups_are_neighbors(ranks: int, tp: int) -> None:
    plan = MeshPlan(dp_shard=-1, dp_replicate=1, tp=tp, secondary=2)
    mesh = Mesh.create(plan, torch.device("cpu"), GLOO.comm)
    me = mesh.mesh_group.rank
    low = me // (2 * tp) * 2 * tp + me % tp
    assert mesh.secondary.exchange([me]) == [[low], [low + tp]]
    mesh.close()


TRAINING_WIDTH, HIDDEN = 24, 37
HALF = torch.bfloat16
SHARDED: dict[str, Plan] = {
    "zero1": zero(1, HALF).but(packing=ByNumel(chunk_numel=600)),
    "zero2_fp32": zero(2),
    "zero2_late": zero(2, HALF).but(gather_on_use=True, update="backward"),
    "zero3": zero(3, HALF),
    "zero3_fp32": zero(3),
    "zero3_host": zero(3, HALF).but(tiers=replace(on_device(), param_host_fraction=1.0, state_host_fraction=1.0)),
    "no_masters": zero(2, HALF).but(master_weights=False),
    "ddp": replicated(),
}
REPLICATED = {"zero2_hybrid": zero(2, HALF, dp_replicate=2), "zero3_hybrid": zero(3, dp_replicate=2)}
"""Plans for four ranks: reduce-scatter, then all-reduce over replicas."""
WHOLE: dict[str, Plan] = {
    "int8": zero(3, HALF).but(compress_weights="int8", compress_gradients="int8"),
    "int4": zero(2, HALF).but(compress_gradients="int4"),
    "weights": zero(3).but(compress_weights="int8"),
    "gradients": replicated().but(compress_gradients="int8"),
    "frozen": zero(3, HALF).but(compress_weights="int8", compress_frozen="int4"),
}
"""Plans with integer formats, for weights, gradients or both."""


class Net(nn.Module):
    """A network with a frozen layer, which has no masters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(TRAINING_WIDTH, HIDDEN)
        self.still = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, 5)
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.still(torch.tanh(self.first(x)))))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a regression that the model can learn."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, TRAINING_WIDTH, generator=generator)
    return x, torch.sin(x[:, :5] * 1.5)


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (module(x).float() - y).square().mean()


def trained(plan: Plan, mesh: Mesh, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = net(), list[float]()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with sharded(model, optimizer, plan, mesh) as session:
        for step in range(steps):
            loss = loss_of(session.module, mesh.rank, step)
            session.backward(loss)
            session.optimizer.step()
            session.optimizer.zero_grad()
            losses.append(loss.item())
        alike(session)
        return losses, {name: value.clone() for name, value in session.module.state_dict().items()}


def alike(session: Session) -> None:
    """Check that all ranks compute with the same parameters, and that these are the rounded masters."""
    engine = session._engine
    with session.module.gathered():
        own = torch.cat([p.detach().float().flatten() for p in session.params])
    group = session.mesh.world
    rows = torch.tensor(group.exchange(own.double().tolist()), dtype=torch.float64)
    assert torch.equal(rows.nan_to_num(), rows[:1].expand_as(rows).nan_to_num())
    for chunk in engine.shards.chunks:
        state = engine.shards.states.get(chunk.spec.index)
        if state is None or session.mesh.shard.size == 1:
            continue
        assert state.master is not None
        expected = state.master.to(chunk.spec.dtype, copy=True)
        if session.plan.comm.weights is not None:
            FORMATS[session.plan.comm.weights][0].round_(expected)
        with chunk.opened() as shard:
            assert torch.equal(shard, expected)


def transports(names: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    results = []
    for name in names:
        plan = WHOLE[name] if name in WHOLE else (SHARDED | REPLICATED)[name].but(compress="fp8")
        found = []
        with ExitStack() as stack:
            for shared in (True, False):
                own = plan.but(shared_memory=shared)
                found.append(trained(own, stack.enter_context(one_mesh(own)), steps=4))
        assert found[0][0] == found[1][0], name
        for key, value in found[0][1].items():
            assert torch.equal(value, found[1][1][key]), (name, key)
        results.append(found[0])
    return results


@pytest.mark.parametrize(
    ("size", "names"), [(3, ["zero1", "zero3"]), (2, list(WHOLE)), *full((2, list(SHARDED)), (4, list(REPLICATED)))]
)
def test_compressed_training_is_equal_over_all_transports(size: int, names: list[str]) -> None:
    results = run_ranks(size, transports, names)
    frozen = {key: value for key, value in net().state_dict().items() if "still" in key}
    for name, one, *others in zip(names, *results, strict=True):
        for key, value in frozen.items():  # not compressed
            exact = value.to((SHARDED | REPLICATED | WHOLE)[name].precision.param_dtype or torch.float32)
            assert torch.equal(one[1][key].to(exact.dtype), exact)
        for other in others:
            assert_close(other[1], one[1], 0.0, name)
    if "frozen" in names:  # the first loss differs, because frozen weights are rounded, too
        assert results[0][names.index("frozen")][0][0] != results[0][names.index("int8")][0][0]


@pytest.mark.parametrize("name", ["zero2_fp32", "ddp", *full("zero3_fp32")])
@on_ranks(2)
def test_errors_of_compression_are_within_the_documented_bounds(name: str) -> None:
    model, exact = net(), net().state_dict()
    plan = SHARDED[name].but(compress="fp8", shared_memory=False)
    with sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), plan) as session:
        with session.module.gathered():
            used = {name: p.detach().clone() for name, p in session.module.module.named_parameters()}
        masters = dict(session.module.full_state())
        session.reset_traffic()
        session.backward(loss_of(session.module, session.mesh.rank, 0))
        gradients, traffic = session.full_gradients(), session.traffic()
        session.optimizer.step()
        stepped, whole = session.module.state_dict(), session.traffic()
        chunks = [chunk for chunk in session._engine.shards.layout.chunks if chunk.trainable]
    for key, value in used.items():
        error = (value - exact[key]).abs()
        assert (error <= 2**-4 * exact[key].abs() + 2**-17).all()
        assert bool(error.any()) == (name != "ddp" and "still" not in key)
        assert torch.equal(masters[key], exact[key])  # masters are never rounded
    per_rank = [gradients_at(used, rank) for rank in range(2)]
    for key, value in gradients.items():
        terms = torch.stack([each[key] for each in per_rank])
        bound = (0.27 if name == "ddp" else 0.126) * terms.abs().mean(0) + 2**-28 * terms.abs().max()
        assert ((value - terms.mean(0)).abs() <= bound).all()
        assert not torch.equal(value, terms.mean(0))
        torch.testing.assert_close(stepped[key], exact[key] - value, atol=1e-7, rtol=1e-6)
    own = sum(numel + -(-numel // BLOCK) for numel in (chunk.padded_numel // 2 for chunk in chunks))
    if name == "ddp":
        assert traffic["all_reduce"] == 2 * own and whole["all_gather"] == 0
    else:
        assert traffic["reduce_scatter"] == own
    if name == "zero2_fp32":  # one gather of updated parameters, and full states
        assert whole["all_gather"] - traffic["all_gather"] >= own
        assert whole["all_gather"] <= own + 3 * sum(chunk.shard_numel(0) * 4 for chunk in chunks) + 4096


def gradients_at(params: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    model = net()
    model.load_state_dict(params)
    loss_of(model, rank, 0).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(session: Session, expected: dict[str, Tensor]) -> None:
    alike(session)
    for name, value in session.module.full_state():
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_masters_are_not_rounded() -> None:
    """Edits of a program go to the masters; masters of unedited elements keep their bits, also after a load."""
    for plan in (zero(3), zero(2), zero(2, HALF)):
        plan = plan.but(compress="fp8")
        model = net()
        with sharded(model, torch.optim.SGD(model.parameters(), lr=0.0), plan) as session:
            before = {n: v.clone() for n, v in session.module.full_state()}
            with session.module.gathered(write_back=True), torch.no_grad():
                model.first.bias[2] = 0.5
            expected = {n: v.clone() for n, v in before.items()}
            expected["first.bias"][2] = 0.5
            same(session, expected)
            if plan.shard.always_gathered:
                with torch.no_grad():
                    model.last.weight[1].fill_(0.25)
                expected["last.weight"][1] = 0.25
            session.backward(loss_of(session.module, session.mesh.rank, 0))
            session.optimizer.step()
            same(session, expected)
            half = dict(session.module.full_state(masters=False))
            for name, value in expected.items():
                kind = torch.float32 if plan.precision.param_dtype is None else HALF
                assert torch.equal(half[name], value.to(kind))
            session.module.load_state_dict(before)
            same(session, before)


@on_ranks(2)
def test_unsupported_compression_is_refused() -> None:
    model, plan = net().double(), zero(2)
    with one_mesh(plan) as mesh:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refusal = r"compress='fp8'.*float64.*first.weight"
        raises(ValueError, refusal, build, model, optimizer, plan.but(compress="fp8"), mesh)
    disk = tiers("/tmp", (0.0, 0.0), (0.0, 1.0))
    for changes, words in (
        ({"compress": "fp8", "tiers": disk}, r"compress='fp8' \(fp8_communication\) with disk=DiskPlan"),
        ({"compress": "fp4"}, "compress='fp4'"),
        ({"compress_gradients": "int2"}, "compress_gradients='int2': give one of 'fp8', 'int8', 'int4', or None"),
        ({"compress_weights": "int8", "tiers": disk}, r"compress_weights='int8' \(fp8_communication\) with disk=Disk"),
    ):
        raises(ValueError, words, plan.but, **changes)
