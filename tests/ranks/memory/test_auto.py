"""Placement by the memory trace (``"auto"``), and the limit of a device capacity.

Training has the same bits within any capacity. A capacity that is too small raises on every rank and loses no state. A
damaged checkpoint whose error comes late reports what was loaded already.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.tier import Tier
from shardwise.core.memory.trace.standalone import trace_memory
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.mesh import Mesh
from shardwise.core.shards.gather_hooks import in_backward
from shardwise.plan import AutoPlan, Plan, TierPlan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.faults.fuzz.changes import apply_change
from tests.faults.fuzz.subjects import EngineSubject
from tests.support.engine_setup import one_mesh, sharded
from tests.support.formats_setup import flip
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.tier_setup import digest

WIDTH = 32


class Block(nn.Module):
    """A layer of ``[rows, 32]``, 8.3 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks in the order ``order``, the next order at each call; ``checkpointed`` recomputes them in backward."""

    def __init__(self, orders: Sequence[Sequence[int]], checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(1 + max(max(order) for order in orders)))
        self.orders, self.checkpointed, self.calls = orders, checkpointed, 0

    def forward(self, x: Tensor) -> Tensor:
        order = self.orders[self.calls % len(self.orders)]
        self.calls += torch.is_grad_enabled()
        for index in order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


PLAIN = [range(8)]
TWICE = [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]
SKIPS = [range(8), [0, 2, 4, 6], [7, 6, 5, 4, 3, 2, 1, 0], [0, 0, 1, 1, 7]]
BLOCK_BYTES = 4 * sum(p.numel() for p in Block().parameters())


def auto(capacity: int, warmup: float = 0.8, steady: float = 0.9, margin: float = 0.0) -> TierPlan:
    """Return a plan with placement by the trace."""
    ratios = AutoPlan(warmup_non_model_ratio=warmup, steady_capacity_ratio=steady, margin_ratio=margin)
    return replace(on_device(), device_capacity_bytes=capacity, auto=ratios)


def plan_of(tiers: TierPlan | None = None, **changes: Any) -> Plan:
    """Return ZeRO-3 with a unit per block and without prefetch."""
    plan = zero(3).but(**({"prefetch": 0} | changes))
    return plan if tiers is None else plan.but(tiers=tiers)


@dataclass
class Found:
    """One training run on a rank, with a list entry per step."""

    losses: list[float] = field(default_factory=list)
    state: str = ""
    moved: list[int] = field(default_factory=list)
    budgets: list[list[int]] = field(default_factory=list)
    peak_gathered: list[int] = field(default_factory=list)
    peak: int = 0
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    stats: MemStats | None = None
    rest: int = 0
    """The maximum of memory in addition to model data, over all traced steps."""


Step = Callable[[Session, int], list[Tensor]]
"""The losses of one step, each for a backward pass."""


def x_of(rank: int, step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def plain_step(session: Session, step: int) -> list[Tensor]:
    return [session.module(x_of(session.mesh.rank, step)).square().mean()]


def train(
    build_model: Callable[[], nn.Module],
    plan: Plan,
    mesh: Mesh | None,
    step_of: Step = plain_step,
    steps: int = 4,
    prepare: Callable[[Session], None] | None = None,
    watched: bool = True,
) -> Found:
    """Run once on a rank; ``watched`` calls :func:`watch`, which takes several times as long as the training."""
    torch.manual_seed(0)
    model = build_model()
    found = Found()
    with sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, mesh) as session:
        if prepare is not None:
            prepare(session)
        pool = session._engine.pool
        if watched:
            watch(session, found)
        for step in range(steps):
            before, pool.peak_gathered_bytes = pool.moved_bytes, 0
            found.budgets.append([])
            for loss in step_of(session, step):
                session.backward(loss)
                found.losses.append(float(loss.detach()))
            session.optimizers[0].step()
            found.moved.append(pool.moved_bytes - before)
            found.peak_gathered.append(pool.peak_gathered_bytes)
            stats = session.memory_stats()
            found.rest = max(found.rest, stats.peak_non_model_bytes if stats is not None else 0)
        found.peak = session.ledger.peak_bytes
        found.tiers = session.memory().by_tier
        found.stats = session.memory_stats()
        found.state = digest([session.module.state_dict(), session.optimizers[0].state_dict()])
    return found


def watch(session: Session, found: Found) -> None:
    """Record the budget at each use, and compare the accounts with an independent count."""
    pool, ledger = session._engine.pool, session.ledger

    def use(unit: int) -> None:
        if pool.in_training and len(found.budgets[-1]) < len(pool.trace.current):
            found.budgets[-1].append(pool.limits.budget_bytes())

    def ready(unit: int) -> None:
        if ledger.capacity_bytes is not None:
            # Optimizer state that does not exist yet is accounted for.
            counted, accounted = model_data(session), ledger.model_bytes() - session._engine.accounts.reserved_bytes()
            assert counted == accounted, f"{accounted} accounted, {counted} are there: {ledger.bytes_by_kind()}"
            held = sum(ledger.bytes_by_kind().values())
            assert held <= ledger.capacity_bytes, f"{held} of {ledger.capacity_bytes}: {ledger.bytes_by_kind()}"

    session._engine.events.unit_requested.listen(use)
    session._engine.events.unit_ready.listen(ready)


def model_data(session: Session) -> int:
    """Return the bytes of model data on the device, from the tensors themselves."""
    engine = session._engine
    tensors = [chunk.full for chunk in engine.shards.chunks if chunk.full is not None]
    tensors += [chunk.source.exchange.local for chunk in engine.shards.chunks if chunk.source.tier is Tier.DEVICE]
    tensors += [array for idle in engine.pool.arrays._idle.values() for array in idle]
    tensors += engine.grads.reducer._buckets.arrays()
    for grads in engine.grads.reducer.states:
        kept = (grads.bucket, grads.overflow)
        at_home = (grads.shard_memory, grads.reduced) if grads.home is Tier.DEVICE else ()
        tensors += [t for t in (*kept, *at_home) if t is not None]
        if grads.ring is not None and grads.home is Tier.DEVICE:
            tensors += grads.ring.idle()
    for own in session.optimizers:
        for tile in own.updates.tiles:
            if tile.state.tier is Tier.DEVICE:
                tensors += [tile.state.master] if tile.state.master is not None else []
                for piece in tile.pieces:
                    tensors += [v for v in own.optimizer.state.get(piece.value, {}).values() if isinstance(v, Tensor)]
        tensors += [s for (_, tier), s in own.updates.stepper._scratch.items() if tier is Tier.DEVICE]
    given_up = sum(s.nbytes() for s in (r() for r in engine.pool.arrays._dropped) if s is not None)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) + given_up


ROOMY = 100 * BLOCK_BYTES


def with_evaluation(session: Session, step: int) -> list[Tensor]:
    """Evaluate before the first step and between steps, with other batch sizes, in both ways; then generate."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            session.module.eval()
            session.module(x_of(session.mesh.rank, 70 + step, rows=3))
            session.module.train()
    with torch.no_grad(), session.module.gathered() if step == 1 else torch.no_grad():
        x = x_of(session.mesh.rank, 80)
        for _ in range(2):
            x = session.module(x) * 0.5
    return plain_step(session, step)


def changing_rows(session: Session, step: int) -> list[Tensor]:
    return [session.module(x_of(session.mesh.rank, step, rows=(4, 16, 1, 8)[step % 4])).square().mean()]


def several_forwards(session: Session, step: int) -> list[Tensor]:
    x, y = x_of(session.mesh.rank, step), x_of(session.mesh.rank, 30 + step)
    return [(session.module(x) * session.module(y)).mean(), session.module(y).square().mean()]


def accumulating(session: Session, step: int) -> list[Tensor]:
    for micro in range(2 if step % 2 else 1):
        session.backward(session.module(x_of(session.mesh.rank, 10 * step + micro)).square().mean())
    return plain_step(session, step + 50)


def by_rank(session: Session, step: int) -> list[Tensor]:
    """Use different blocks on different ranks."""
    model = session.module.unwrap()
    model.calls = step + session.mesh.rank
    return plain_step(session, step)


PROGRAMS: dict[str, tuple[Callable[[], Stack], Step]] = {
    "checkpointed twice": (partial(Stack, TWICE, checkpointed=True), plain_step),
    "changing": (partial(Stack, SKIPS), plain_step),
    "ranks differ": (partial(Stack, SKIPS, checkpointed=True), by_rank),
    "evaluation": (partial(Stack, PLAIN), with_evaluation),
    "rows": (partial(Stack, PLAIN), changing_rows),
    "forwards": (partial(Stack, PLAIN, checkpointed=True), several_forwards),
    "accumulation": (partial(Stack, TWICE), accumulating),
}


UNSTEADY = {"changing", "ranks differ", "evaluation", "rows"}
"""Programs that need more: gradients in an unexpected order wait in separate memory, ``gathered()`` needs all blocks at
once, and a larger batch is not in the trace."""


def tight(name: str, rest: int, ranks: int) -> int:
    """Return a capacity that is just enough: two gradients in flight, more where ranks wait for each other, and the
    blocks in use."""
    return rest + (11 if ranks > 1 or name in UNSTEADY else 5) * BLOCK_BYTES


SOME = {"checkpointed twice": 3, "changing": 4, "evaluation": 3, "rows": 4, "forwards": 3, "accumulation": 3}
"""Numbers of steps; several ranks run "ranks differ" as well."""
SEVERAL = dict.fromkeys(["checkpointed twice", "evaluation", "ranks differ"], 4)


def programs(shared: bool | None, steps: dict[str, int], changes: dict[str, Any]) -> dict[str, dict[str, Found]]:
    """Run each program on a rank without a limit, and under a tight and a roomy capacity."""
    found: dict[str, dict[str, Found]] = {}
    with one_mesh(zero(3).but(shared_memory=shared)) as mesh:
        for name in steps:
            build_model, step_of = PROGRAMS[name]

            def run(tiers: TierPlan | None) -> Found:
                plan = plan_of(tiers, shared_memory=shared, **changes)
                return train(build_model, plan, mesh, step_of, steps[name])  # noqa: B023

            plain, roomy = run(None), run(auto(ROOMY, margin=0.9))
            found[name] = {"plain": plain, "margin": roomy, "tight": run(auto(tight(name, roomy.rest, mesh.size)))}
    return found


@pytest.mark.parametrize("ranks, shared, steps, changes", [
    *full((1, None, SOME, {})),
    *campaign((1, None, dict.fromkeys(PROGRAMS, 4), {}), (2, None, SEVERAL, {})),
    *campaign((2, False, SEVERAL, {"same_order": False})),
    *full((2, False, {"ranks differ": 3}, {"prefetch": 2, "same_order": False})),
    *campaign((4, None, {"ranks differ": 4}, {})),
    (1, None, {"evaluation": 3, "accumulation": 3}, {}),  # the tests below have the other programs
])  # fmt: skip
def test_same_bits_within_the_capacity(
    ranks: int, shared: bool | None, steps: dict[str, int], changes: dict[str, Any]
) -> None:
    for rank, found in enumerate(run_ranks(ranks, programs, shared, steps, changes, timeout=120)):
        for name, runs in found.items():
            for key in ("tight", "margin"):
                where = f"{name}, {key}, rank {rank}"
                assert runs[key].losses == runs["plain"].losses, where
                assert runs[key].state == runs["plain"].state, where
            assert 0 < runs["tight"].peak <= tight(name, runs["margin"].rest, ranks), name
            assert 0 < runs["margin"].peak <= ROOMY, name
            assert runs["tight"].stats is not None and runs["tight"].stats.moments


# ---- the ratios


@pytest.mark.full
@on_ranks(1)
def test_ratios_are_respected() -> None:
    runs = {
        "narrow start": auto(ROOMY, warmup=0.97),
        "no start": auto(ROOMY, warmup=1.0),
        "wide start": auto(ROOMY, warmup=0.0),
        "half": auto(40 * BLOCK_BYTES, warmup=1.0, steady=0.2),
        "little margin": auto(60 * BLOCK_BYTES, margin=0.2),
        "margin": auto(60 * BLOCK_BYTES, margin=1.0),
        "no margin": auto(60 * BLOCK_BYTES),
    }
    found = {name: train(partial(Stack, PLAIN), plan_of(tiers), None) for name, tiers in runs.items()}
    everything = 8 * BLOCK_BYTES
    assert len({run.state for run in found.values()}) == 1
    # Before there is a trace, that share of the capacity stays free of model data, except for the block in use.
    assert found["narrow start"].peak_gathered[0] <= 0.03 * ROOMY < everything
    assert found["no start"].peak_gathered[0] == BLOCK_BYTES
    assert found["no start"].moved[0] > everything  # so the block is gathered again in backward
    assert found["wide start"].peak_gathered[0] == everything == found["wide start"].moved[0]
    # Afterwards the remaining capacity is filled.
    for name in ("narrow start", "no start", "wide start"):
        assert found[name].peak_gathered[1:] == [everything] * 3 and found[name].moved[1:] == [everything] * 3
    for step, budgets in enumerate(found["half"].budgets[1:], 1):
        assert max(budgets) <= 0.2 * 40 * BLOCK_BYTES
        assert found["half"].peak_gathered[step] <= 0.2 * 40 * BLOCK_BYTES - found["half"].rest < everything
    # Optimizer state on the device: none, a share of it, all of it.
    kinds = ("masters", "optimizer state")
    moved = {k: sum(found[k].tiers["device"].get(kind, 0) for kind in kinds) for k in found}
    assert moved["no margin"] == 0 < moved["little margin"] < moved["margin"]
    assert moved["margin"] >= 3 * everything
    assert found["margin"].tiers["host"].get("optimizer state", 0) == 0
    assert found["little margin"].tiers["host"]["optimizer state"] > 0


# ---- memory that the trace did not foresee


def more_rows(session: Session, step: int) -> list[Tensor]:
    return [session.module(x_of(session.mesh.rank, step, rows=50 if step >= 2 else 2)).square().mean()]


@on_ranks(1)
def test_larger_batch_evicts_blocks() -> None:
    """The first steps leave room for all blocks; a later step with more rows leaves room for some of them only."""
    model = partial(Stack, PLAIN)
    plain, roomy = (train(model, plan_of(tiers), None, more_rows) for tiers in (None, auto(ROOMY)))
    limit = roomy.rest + 7 * BLOCK_BYTES
    found = train(model, plan_of(auto(limit)), None, more_rows)
    assert found.losses == plain.losses and found.state == plain.state
    assert found.peak_gathered[1] > found.peak_gathered[3] or found.moved[3] > found.moved[1]
    assert 0 < found.peak <= limit


# ---- saved traces


@on_ranks(1)
def test_a_trace_replaces_the_warm_up_step(tmp_path: Path) -> None:
    """Train with a saved trace, and with one of ``trace_memory``, which has modules instead of units."""
    model, tiers = partial(Stack, PLAIN), auto(12 * BLOCK_BYTES, warmup=1.0)
    first = train(model, plan_of(tiers), None)
    assert first.stats is not None and first.moved[0] > first.moved[-1]
    first.stats.save(tmp_path / "trace.json")
    saved = MemStats.load(tmp_path / "trace.json")
    assert saved == first.stats
    of_modules = trace_memory(model(), x_of(0, 0), lambda module, x: module(x).square().mean())
    orders = list[tuple[int, ...]]()

    def prepare(stats: MemStats, session: Session) -> None:
        session.use_memory_stats(stats)
        orders.append(session.memory_stats().order)  # type: ignore[union-attr]

    for stats in (saved, of_modules):
        other = train(model, plan_of(tiers), None, prepare=partial(prepare, stats))
        assert other.state == first.state and other.moved == [first.moved[-1]] * 4
    assert orders == [first.stats.order] * 2
    shifted = replace(saved, moments=[replace(m, unit=m.unit + 5) for m in saved.moments])
    renamed = replace(saved, moments=[replace(m, name="blocks.9") if m.unit == 3 else m for m in saved.moments])
    resized = replace(saved, gathered_bytes={**saved.gathered_bytes, 3: BLOCK_BYTES + 4})
    of_another = trace_memory(nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH))
    for stats, plan, words in [
        (shifted, plan_of(tiers), "blocks.0"),
        (saved, plan_of(), "declare one"),
        (renamed, plan_of(tiers), "unit 3 is 'blocks.9'"),
        (resized, plan_of(tiers), str(BLOCK_BYTES + 4)),
        (of_another, plan_of(tiers), "unit 0 is"),
    ]:
        network = model()
        with sharded(network, torch.optim.SGD(network.parameters(), lr=0.1), plan) as session:
            assert words in raises(ValueError, "same plan recorded", session.use_memory_stats, stats)
    # A trace of another order is only a bad prediction.
    wrong = replace(saved, moments=list(saved.moments)[::-1])
    skips = partial(Stack, SKIPS)
    guessed = train(skips, plan_of(tiers), None, prepare=partial(prepare, wrong))
    assert guessed.state == train(skips, plan_of(), None).state


def save(root: str, tags: list[str]) -> None:
    subject = EngineSubject()
    for tag in tags:
        subject.step()
        subject.save(Path(root), tag)
    subject.session.close()


def loaded(root: str, strict: bool) -> tuple[str, str]:
    """Return the class and text of the error of a load, or the tag if it loaded without one."""
    subject = EngineSubject()
    subject.step()
    try:
        restored = subject.saver.load(root, "auto", strict=strict, lr_schedulers=[subject.scheduler])
        return (restored.tag, "") if restored is not None else ("", "")
    except (CheckpointError, ValueError) as error:
        return type(error).__name__, str(error)
    finally:
        subject.session.close()


def damage(folder: Path, name: str) -> None:
    """Change a byte in the last shard of a tensor."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    file, offset, *_ = manifest["tensors"][name]["pieces"][-1]
    flip(folder / manifest["files"][file][0], offset)


def without(folder: Path, name: str) -> None:
    """Remove a parameter from the checkpoint, as that of a smaller model lacks it."""
    path = ["tensors", f"model/{name}"]
    apply_change(folder, {"op": "tree", "file": "manifest.json", "do": "drop", "path": path})


@pytest.mark.parametrize("ranks", [1, *full(2)])
def test_auto_reports_what_a_damaged_checkpoint_replaced(tmp_path: Path, ranks: int) -> None:
    whole, partly = tmp_path / "whole", tmp_path / "partly"
    run_ranks(ranks, save, str(whole), ["old", "new"])
    damage(whole / "new", "model/second.bias")
    assert run_ranks(ranks, loaded, str(whole), True) == [("old", "")] * ranks
    shutil.copytree(whole, partly)
    without(partly / "old", "narrow")
    assert run_ranks(ranks, loaded, str(partly / "old"), False) == [("old", "")] * ranks
    for kind, text in run_ranks(ranks, loaded, str(partly), False):
        assert kind == CheckpointError.__name__
        assert f"{partly}/old does not replace narrow, which a damaged checkpoint changed" in text
        assert "already loaded (load another checkpoint before going on)" in text
    damage(whole / "old", "model/second.bias")
    for kind, text in run_ranks(ranks, loaded, str(whole), True):
        assert kind == CheckpointDamage.__name__
        assert f"{whole}/new, {whole}/old were already loaded); load another copy" in text


FOUR, FOUR_BACK = range(4), [3, 2, 1, 0]
FOUR_BLOCKS = 4 * BLOCK_BYTES


def fixed(capacity: int | None, param: float = 0.0, state: float = 0.0) -> TierPlan:
    return replace(on_device(), device_capacity_bytes=capacity, param_host_fraction=param, state_host_fraction=state)


@pytest.mark.parametrize("ranks, shared", [(1, None), *full((2, False)), *campaign((2, None))])
@on_ranks()
def test_training_continues_with_a_smaller_batch(ranks: int, shared: bool | None) -> None:
    """A step fails for its large batch; smaller batches continue from the state before it."""
    limit = FOUR_BLOCKS + 8 * BLOCK_BYTES
    states = []
    with one_mesh(zero(3).but(shared_memory=shared)) as mesh:
        for tiers in (fixed(None), fixed(limit, param=1.0, state=1.0), auto(limit)):
            torch.manual_seed(0)
            model = Stack([FOUR])
            plan = plan_of(tiers, shared_memory=shared)
            with sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, mesh) as session:
                for step in range(4):
                    if tiers.device_capacity_bytes is not None and step in (0, 2):
                        before = session.module.state_dict()
                        said = raises(DeviceMemoryError, "smaller micro-batch", one_step, session, step, rows=400)
                        assert "activations and the rest: " in said
                        session.optimizers[0].zero_grad()
                        assert_close(session.module.state_dict(), before, 0.0, "after a batch that was too large")
                    one_step(session, step, rows=4)
                    assert tiers.device_capacity_bytes is None or model_data(session) <= limit
                states.append({n: v.clone() for n, v in session.module.state_dict().items()})
                assert_close(states[-1], states[0], 0.0, f"{tiers}")


def one_step(session: Session, step: int, rows: int) -> None:
    session.backward(session.module(x_of(session.mesh.rank, step, rows)).square().mean())
    session.optimizers[0].step()


# ---- one rank only: without shared memory the other ranks would wait for it


PLACES = [
    ("forward", "before the next unit was gathered"),
    ("forward", "in the forward pass"),
    ("forward", "what others gather"),
    ("backward", "before the next unit was gathered"),
    ("backward", "in the backward pass"),
]
"""Places where one rank runs out of memory: the phase, and the request to the ledger."""


@contextlib.contextmanager
def too_small(session: Session, place: tuple[str, str]) -> Iterator[None]:
    real = session.ledger.check_peak

    def check(non_model_bytes: int, when: str, total_bytes: int = 0) -> None:
        phase = "backward" if in_backward() or when == "in the backward pass" else "forward"
        if (phase, when) == place:
            raise DeviceMemoryError(f"{when}: made up for the test")
        real(non_model_bytes, when, total_bytes)

    alone = mock.patch.object(session._engine.pool, "_peers_fit", lambda *_: False)
    others = alone if place == PLACES[2] else contextlib.nullcontext()
    with mock.patch.object(session.ledger, "check_peak", check), others:
        yield


@pytest.mark.parametrize(("prefetches", "places"), [([0], [2, 3]), *full(([0, 2], [*range(len(PLACES))]))])
@on_ranks(2)
def test_too_little_memory_on_one_rank_reaches_all(prefetches: list[int], places: list[int]) -> None:
    """Rank 1 fails in each of ``places`` in turn, for its batch; then all ranks train on as if nothing had happened."""
    limit = FOUR_BLOCKS + 8 * BLOCK_BYTES
    states = []
    with one_mesh(zero(3).but(shared_memory=False)) as mesh:
        for disturbed, prefetch in ((False, prefetches[0]), *((True, each) for each in prefetches)):
            torch.manual_seed(0)
            model = Stack([FOUR, FOUR_BACK])
            plan = plan_of(fixed(limit, param=1.0, state=1.0), shared_memory=False, prefetch=prefetch)
            with sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, mesh) as session:
                for step, place in enumerate([*(PLACES[at] for at in places), None]):
                    if disturbed:
                        # Ranks with different orders gather different units.
                        model.calls = step + (mesh.rank if place == PLACES[2] else 0)
                        words = "made up" if place else "activations and the rest: "
                        if mesh.rank == 0 or place == PLACES[2]:
                            words = r"ranks \[1\] of .* not enough device memory"
                        with too_small(session, place) if place and mesh.rank else contextlib.nullcontext():
                            rows = 4 if place or mesh.rank == 0 else 400
                            raises(DeviceMemoryError, words, one_step, session, step, rows)
                        session.optimizers[0].zero_grad()
                    model.calls = step
                    one_step(session, step, rows=4)
                states.append({n: v.clone() for n, v in session.module.state_dict().items()})
                assert_close(states[-1], states[0], 0.0, f"disturbed={disturbed}, prefetch={prefetch}")


@pytest.mark.parametrize(("kind", "states"), [(torch.optim.SGD, 0), (torch.optim.Adam, 2)])
@on_ranks(1)
def test_optimizer_state_is_counted_before_it_exists(kind: Any, states: int) -> None:
    """Optimizer state is counted when the model is sharded."""
    model = Stack(PLAIN)
    optimizer, gradients = kind(model.parameters(), lr=0.1), 2 * BLOCK_BYTES
    needed = sum(p.numel() * 4 for p in model.parameters()) * (1 + states) + gradients
    raises(DeviceMemoryError, None, build, model, optimizer, plan_of(fixed(needed - 1000)))
    with sharded(model, optimizer, plan_of(fixed(needed + 1000))) as session:
        assert session._engine.accounts.state_bytes(Tier.DEVICE) == (0, 0)
        assert not optimizer.state  # the check allocates nothing
