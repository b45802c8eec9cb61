"""Placement from the memory trace (``auto``): the same bits within any capacity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from auto_setup import (
    BLOCK_BYTES,
    PLAIN,
    SKIPS,
    TWICE,
    WIDTH,
    Found,
    Stack,
    Step,
    auto,
    plain_step,
    plan_of,
    train,
    x_of,
)
from torch import Tensor

from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.memory.trace.tracing import trace_memory
from shardwise.plan import TierPlan, zero
from shardwise.session import Session, build
from shardwise.testing import run_ranks
from tests.support.engine_setup import one_mesh
from tests.support.sets import campaign, full

ROOMY = 100 * BLOCK_BYTES


def with_evaluation(session: Session, step: int) -> list[Tensor]:
    """Evaluation before the first step and between steps, of other sizes, in both ways; then generation."""
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
    """Ranks use different blocks."""
    model = session.module.unwrap()
    model.calls = step + session.mesh.rank
    return plain_step(session, step)


PROGRAMS: dict[str, tuple[Callable[[], Stack], Step]] = {
    "plain": (partial(Stack, PLAIN), plain_step),
    "checkpointed": (partial(Stack, PLAIN, checkpointed=True), plain_step),
    "checkpointed twice": (partial(Stack, TWICE, checkpointed=True), plain_step),
    "twice": (partial(Stack, TWICE), plain_step),
    "changing": (partial(Stack, SKIPS), plain_step),
    "ranks differ": (partial(Stack, SKIPS, checkpointed=True), by_rank),
    "evaluation": (partial(Stack, PLAIN), with_evaluation),
    "rows": (partial(Stack, PLAIN), changing_rows),
    "forwards": (partial(Stack, PLAIN, checkpointed=True), several_forwards),
    "accumulation": (partial(Stack, TWICE), accumulating),
}


UNSTEADY = {"changing", "ranks differ", "evaluation", "rows"}
"""Gradients in an unexpected order wait in memory of their own, ``gathered()`` needs all blocks at once, and a batch
that has grown was not foreseen by the trace."""


def tight(name: str, rest: int, ranks: int) -> int:
    """Bytes of a capacity that is hardly enough: two gradients under way, more where ranks wait for each other, and the
    blocks in use."""
    return rest + (11 if ranks > 1 or name in UNSTEADY else 5) * BLOCK_BYTES


SOME = {"checkpointed twice": 3, "changing": 4, "evaluation": 3, "rows": 4, "forwards": 3, "accumulation": 3}
"""Steps of each; every model and every kind of step is there: what is left out is a part of one of them, but for "ranks
differ", which several ranks run."""
SEVERAL = dict.fromkeys(["checkpointed twice", "evaluation", "ranks differ"], 4)


def programs(shared: bool | None, steps: dict[str, int], changes: dict[str, Any]) -> dict[str, dict[str, Found]]:
    """On a rank: each program without a limit, under a tight and under a roomy capacity."""
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
    (1, None, {"evaluation": 3, "accumulation": 3}, {}),  # the tests below have others
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


def ratios() -> dict[str, Found]:
    model = partial(Stack, PLAIN)
    runs = {
        "narrow start": auto(ROOMY, warmup=0.97),
        "no start": auto(ROOMY, warmup=1.0),
        "wide start": auto(ROOMY, warmup=0.0),
        "half": auto(40 * BLOCK_BYTES, warmup=1.0, steady=0.2),
        "little margin": auto(60 * BLOCK_BYTES, margin=0.2),
        "margin": auto(60 * BLOCK_BYTES, margin=1.0),
        "no margin": auto(60 * BLOCK_BYTES),
    }
    return {name: train(model, plan_of(tiers), None) for name, tiers in runs.items()}


@pytest.mark.full
def test_ratios_are_respected() -> None:
    found = run_ranks(1, ratios)[0]
    everything = 8 * BLOCK_BYTES
    assert len({run.state for run in found.values()}) == 1
    # Before there is a trace: that share of the capacity stays free of model data, but the block in use is there.
    assert found["narrow start"].peak_gathered[0] <= 0.03 * ROOMY < everything
    assert found["no start"].peak_gathered[0] == BLOCK_BYTES
    assert found["no start"].moved[0] > everything  # and so it is fetched again in backward
    assert found["wide start"].peak_gathered[0] == everything == found["wide start"].moved[0]
    # Afterwards what is left is filled.
    for name in ("narrow start", "no start", "wide start"):
        assert found[name].peak_gathered[1:] == [everything] * 3 and found[name].moved[1:] == [everything] * 3
    for step, budgets in enumerate(found["half"].budgets[1:], 1):
        assert max(budgets) <= 0.2 * 40 * BLOCK_BYTES
        assert found["half"].peak_gathered[step] <= 0.2 * 40 * BLOCK_BYTES - found["half"].rest < everything
    # State moves: nothing, a share of it, all of it.
    kinds = ("masters", "optimizer state")
    moved = {k: sum(found[k].tiers["device"].get(kind, 0) for kind in kinds) for k in found}
    assert moved["no margin"] == 0 < moved["little margin"] < moved["margin"]
    assert moved["margin"] >= 3 * everything
    assert found["margin"].tiers["host"].get("optimizer state", 0) == 0
    assert found["little margin"].tiers["host"]["optimizer state"] > 0


# ---- what the trace did not foresee


def more_rows(session: Session, step: int) -> list[Tensor]:
    return [session.module(x_of(session.mesh.rank, step, rows=50 if step >= 2 else 2)).square().mean()]


def grown_batches() -> tuple[Found, Found, Found]:
    """The first steps leave room for all blocks; what a later step needs itself leaves room for some of them."""
    model = partial(Stack, PLAIN)
    plain, roomy = (train(model, plan_of(tiers), None, more_rows) for tiers in (None, auto(ROOMY)))
    return plain, roomy, train(model, plan_of(auto(roomy.rest + 7 * BLOCK_BYTES)), None, more_rows)


def test_a_batch_that_has_grown_makes_room_for_itself() -> None:
    plain, roomy, found = run_ranks(1, grown_batches)[0]
    limit = roomy.rest + 7 * BLOCK_BYTES
    assert found.losses == plain.losses and found.state == plain.state
    assert found.peak_gathered[1] > found.peak_gathered[3] or found.moved[3] > found.moved[1]
    assert 0 < found.peak <= limit


# ---- saved traces


def with_saved_trace(path: str) -> dict[str, Any]:
    model, tiers = partial(Stack, PLAIN), auto(12 * BLOCK_BYTES, warmup=1.0)
    first = train(model, plan_of(tiers), None)
    assert first.stats is not None
    first.stats.save(path)
    saved = MemStats.load(path)
    second = train(model, plan_of(tiers), None, prepare=lambda session: session.use_memory_stats(saved))
    found: dict[str, Any] = {"first": first, "second": second, "equal": saved == first.stats, "refused": []}
    other = dataclasses.replace(saved, moments=[dataclasses.replace(m, unit=m.unit + 5) for m in saved.moments])
    named = [dataclasses.replace(m, name="blocks.9") if m.unit == 3 else m for m in saved.moments]
    renamed = dataclasses.replace(saved, moments=named)
    resized = dataclasses.replace(saved, gathered_bytes={**saved.gathered_bytes, 3: BLOCK_BYTES + 4})
    refused = [(other, plan_of(tiers), "blocks.0"), (saved, plan_of(), "declare one")]
    refused += [(renamed, plan_of(tiers), "unit 3 is 'blocks.9'"), (resized, plan_of(tiers), str(BLOCK_BYTES + 4))]
    for stats, plan, word in refused:
        network = model()
        session = build(network, torch.optim.SGD(network.parameters(), lr=0.1), plan)
        with pytest.raises(ValueError, match="same plan recorded") as error:
            session.use_memory_stats(stats)
        assert word in str(error.value), error.value
        session.close()
        session.mesh.close()
    # A trace of another order is only a bad guess.
    wrong = dataclasses.replace(saved, moments=list(saved.moments)[::-1])
    found["wrong"] = train(partial(Stack, SKIPS), plan_of(tiers), None, prepare=lambda s: s.use_memory_stats(wrong))
    found["skips"] = train(partial(Stack, SKIPS), plan_of(), None)
    return found


def test_a_saved_trace_replaces_the_warm_up_step(tmp_path: Path) -> None:
    found = run_ranks(1, with_saved_trace, str(tmp_path / "trace.json"))[0]
    first, second = found["first"], found["second"]
    assert found["equal"] and first.state == second.state
    assert second.moved == [first.moved[-1]] * 4
    assert first.moved[0] > first.moved[-1]
    assert found["wrong"].state == found["skips"].state


def with_a_trace_of_modules() -> dict[str, Any]:
    """The same from ``trace_memory``, which knows modules and no units."""
    model, tiers = partial(Stack, PLAIN), auto(12 * BLOCK_BYTES, warmup=1.0)
    outside = trace_memory(model(), x_of(0, 0), lambda module, x: module(x).square().mean())
    found: dict[str, Any] = {"first": train(model, plan_of(tiers), None)}
    orders: list[tuple[int, ...]] = []

    def prepare(session: Session) -> None:
        session.use_memory_stats(outside)
        stats = session.memory_stats()
        assert stats is not None
        orders.append(stats.order)

    found["second"] = train(model, plan_of(tiers), None, prepare=prepare)
    found["order"] = orders[0]
    network = Stack(SKIPS)
    session = build(network, torch.optim.SGD(network.parameters(), lr=0.1), plan_of(tiers))
    other = trace_memory(torch.nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH))
    with pytest.raises(ValueError, match="unit 0 is"):
        session.use_memory_stats(other)
    session.close()
    session.mesh.close()
    return found


def test_a_trace_of_modules_replaces_the_warm_up_step() -> None:
    found = run_ranks(1, with_a_trace_of_modules)[0]
    first, second = found["first"], found["second"]
    assert first.state == second.state
    assert found["order"] == first.stats.order
    assert first.moved[0] > first.moved[-1] and second.moved == [first.moved[-1]] * 4
