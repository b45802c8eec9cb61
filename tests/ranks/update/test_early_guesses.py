"""Which guesses updates during backward make: in the pass that should be the last, and on a disk few that are wrong."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from early_setup import LOOSE, counting, full_state
from engine_setup import one_mesh, sharded
from sets import campaign, full
from tier_setup import batch, make_net, small_tiles, tiers, with_tiers

from shardwise.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from shardwise.update.early_disk import EarlyDisk

BITES = {"max_norm": 1e-4}
MEAN = LOOSE | {"average": "mean"}


@dataclass
class Steps:
    """What a run did on one rank, by step where it is a list."""

    state: str = ""
    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    """Steps with updates during backward."""
    undone: list[int] = field(default_factory=list)
    """Those of them that were taken back."""
    whole: int = 0
    """Bytes of the values and the state of all tiles, each rounded up to 4096: what one update reads, and writes."""


def run(plan: Plan, mesh: Mesh, passes: Sequence[int], clipped: Collection[int] = (), no_sync: bool = False) -> Steps:
    """Train with so many passes in each step; before some steps the gradients are clipped by hand."""
    found = Steps()
    model = make_net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with small_tiles(), counting() as counts, sharded(model, optimizer, plan, mesh) as session:
        own = session.optimizers[0]
        for step, number in enumerate(passes):
            session.reset_traffic()
            before = dict(counts)
            for index in range(number):
                loss = session.module(batch(mesh.rank, 10 * step + index)).square().mean()
                with session.no_sync() if no_sync and index + 1 < number else nullcontext():
                    session.backward(loss)
            if step in clipped:
                own.clip_grad_by_norm(1e-4)
            own.step()
            found.read.append(session.traffic().get("disk_read", 0))
            found.written.append(session.traffic().get("disk_write", 0))
            found.guessed += [step] if counts["updates"] > before["updates"] else []
            found.undone += [step] if counts["rollbacks"] > before["rollbacks"] else []
        held = own._updates._disk.values()
        found.whole = sum(_padded(4 * (t.tile.end - t.tile.start)) + _padded(t.state_bytes) for t in held)
        found.state = full_state(session)
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


Case = tuple[Plan, dict[str, Any]]
"""A plan, and the settings of :func:`run`."""


def both(cases: list[Case]) -> list[tuple[Steps, Steps]]:
    """On a rank: every case with updates in ``step()`` and during backward."""
    with one_mesh(cases[0][0]) as mesh:
        return [
            (run(plan.but(update="step"), mesh, **how), run(plan.but(update="backward"), mesh, **how))
            for plan, how in cases
        ]


def check(ranks: int, cases: list[Case]) -> list[list[Steps]]:
    """The steps with updates during backward, by rank and case; both ways give the same bits."""
    results = run_ranks(ranks, both, cases, timeout=120.0)
    for pairs in results:
        for plain, early in pairs:
            assert early.state == plain.state
            assert plain.guessed == [] and early.guessed != []
    return [[early for _, early in pairs] for pairs in results]


@pytest.mark.parametrize("ranks", [1, *full(2)])
def test_accumulation_updates_a_disk_once_a_step(ranks: int, tmp_path: Path) -> None:
    every = {"passes": [3] * 8}
    cases: list[Case] = [(zero(2).but(**LOOSE), every), (zero(2).but(**MEAN), every)]
    cases.append((zero(1).but(**MEAN), every | {"no_sync": True}))
    cases = [(with_tiers(plan, "s_disk", str(tmp_path)), how) for plan, how in cases]
    for each in check(ranks, cases):
        # The first step takes its first pass for the last one, so two steps follow without a guess.
        for early in each[:2]:
            assert early.guessed == [0, 3, 4, 5, 6, 7] and early.undone == [0]
        # Here the first results come with the last pass.
        assert each[2].guessed == [*range(8)] and each[2].undone == []
        for early in each:
            assert early.written[1:] == [early.whole] * 7
            # Where the order of the tiles is a new one (the first pass tells which) some are read ahead in vain.
            new_order = 3 if early.undone else 1
            assert early.whole <= early.read[new_order] <= 1.5 * early.whole
            assert [early.read[step] for step in range(1, 8) if step != new_order] == [early.whole] * 6


@pytest.mark.parametrize("ranks", [1, *full(2)])
def test_clipping_that_always_bites_costs_little(ranks: int, tmp_path: Path) -> None:
    """20 steps write a fifth more, since four guesses are wrong, and read up to two fifths more.

    With a guess, and with the update that makes up for it, the order of the tiles changes: up to half of what is read
    ahead was not what is needed next, and is read again.
    """
    plan = with_tiers(zero(2).but(**BITES), "s_disk", str(tmp_path))
    for (early,) in check(ranks, [(plan, {"passes": [1] * 20})]):
        assert early.guessed == early.undone == [0, 3, 8, 17]
        assert sum(early.written) == 24 * early.whole
        assert sum(early.read) <= 1.4 * 20 * early.whole


def test_guesses_in_memory_go_on_and_leave_the_disk_alone(tmp_path: Path) -> None:
    half = replace(tiers("s_disk", str(tmp_path)), state_host_fraction=0.5, state_disk_fraction=0.5)
    ((early,),) = check(1, [(zero(2).but(tiers=half, **BITES), {"passes": [1] * 8})])
    assert early.undone == [*range(8)]
    paused = [1, 2, 4, 5, 6, 7]
    assert [early.written[step] for step in paused] == [early.whole] * 6
    assert [early.read[step] for step in paused] == [early.whole] * 6


def test_a_right_guess_ends_the_row(tmp_path: Path) -> None:
    plan = with_tiers(zero(2).but(**LOOSE), "s_disk", str(tmp_path))
    ((early,),) = check(1, [(plan, {"passes": [1] * 10, "clipped": {0, 4}})])
    assert early.guessed == [0, 3, 4, 7, 8, 9] and early.undone == [0, 4]


def test_no_pause_is_longer_than_16_steps() -> None:
    tile: Any = SimpleNamespace(snapshot=lambda: lambda: None)
    chunk: Any = SimpleNamespace(spec=SimpleNamespace(index=0), renewing=nullcontext)
    disk, guessed = EarlyDisk({0: [tile]}, mock.Mock(), {}, mock.Mock(), 0), []
    for step in range(90):
        if disk.ready:
            guessed.append(step)
            disk.update(chunk, lambda tile, shard: None)
            disk.was_wrong()
            disk.rollback()
        disk.end_step()
    assert guessed == [0, 3, 8, 17, 34, 51, 68, 85]


def test_numbers_of_passes_that_change(tmp_path: Path) -> None:
    how = {"passes": [1, 2, 2, 1, 3, 3]}
    cases: list[Case] = [(zero(stage).but(**changes), how) for stage, changes in ((1, MEAN), (3, LOOSE), (3, MEAN))]
    (found,) = check(1, [*cases, (with_tiers(cases[2][0], "all_disk", str(tmp_path)), how)])
    for early in found[:3]:
        assert early.guessed == [0, 1, 2, 4, 5] and early.undone == [1, 4]
    assert found[3].guessed == [0, 1, 4] and found[3].undone == [1, 4]


# ---- ranks that differ


def only_the_first_guesses(cases: list[Case]) -> list[tuple[Steps, Steps]]:
    with mock.patch.object(EarlyDisk, "ready", property(lambda _: torch.distributed.get_rank() == 0)):
        return both(cases)


@pytest.mark.parametrize("shared", [*full(None), *campaign(False)])
def test_ranks_may_pause_apart(shared: bool | None, tmp_path: Path) -> None:
    plans = [zero(stage).but(shared_memory=shared, **changes) for stage, changes in ((2, LOOSE), (3, BITES), (3, MEAN))]
    how = [{"passes": [1] * 4}, {"passes": [1] * 4}, {"passes": [2] * 4, "clipped": {2}}]
    mixes = ["s_disk", "all_disk", "p_host_s_disk"]
    cases = [(with_tiers(p, m, str(tmp_path)), h) for p, m, h in zip(plans, mixes, how, strict=True)]
    first, second = run_ranks(2, only_the_first_guesses, cases)
    assert [early.state for _, early in first + second] == [plain.state for plain, _ in first + second]
    assert [early.guessed for _, early in second] == [[]] * 3
    guesses = [(early.guessed, early.undone) for _, early in first]
    assert guesses == [([0, 1, 2, 3], []), ([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 1, 2, 3], [0, 2])]


def other_numbers(plan: Plan) -> tuple[Steps, Steps]:
    """Under ``no_sync`` a rank makes two passes and the other three, so that they divide by three."""
    with one_mesh(plan) as mesh:
        how: dict[str, Any] = {"passes": [2 + mesh.rank] * 4, "no_sync": True}
        return run(plan.but(update="step"), mesh, **how), run(plan.but(update="backward"), mesh, **how)


def test_ranks_may_count_apart(tmp_path: Path) -> None:
    plan = with_tiers(zero(1).but(**MEAN), "s_disk", str(tmp_path))
    (plain, first), (_, second) = run_ranks(2, other_numbers, plan)
    assert first.state == second.state == plain.state
    assert (first.guessed, first.undone) == ([0], [0])
    assert (second.guessed, second.undone) == ([0, 1, 2, 3], [])


class Asks(torch.optim.AdamW):
    """Asks in each of its steps what the ranks would compare now."""

    ask: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.ask is not None:
            self.ask()
        return super().step(closure)


def words() -> tuple[list[float], float]:
    model = torch.nn.Linear(4, 4)
    optimizer = Asks(model.parameters(), lr=0.1)
    with sharded(model, optimizer, zero(3).but(update="backward")) as session:
        settings, seen = session.optimizers[0]._settings, []
        optimizer.ask = lambda: seen.append(settings.word())
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizers[0].step()
        optimizer.ask = None
        return seen, settings.word()


def test_settings_are_the_same_while_an_update_runs() -> None:
    """Beside the caller, the optimizer steps a copy of one group, with a kernel of our choice."""
    seen, after = run_ranks(1, words)[0]
    assert seen and set(seen) == {after}
