"""The tiers of model data change no bit of any gradient or parameter: steps under every mix of device, host and disk.

Each row is trained without offload and under several mixes. In the full set (34 rows, 88 runs with a mix) every pair of
values of two factors occurs, every mix with every value, and every optimizer and model with state in memory and on the
disk. The quick set has 10 rows, which :func:`~tests.parity.tiers.quick_rows` chooses: every mix and every value of a
factor other than model and optimizer at least once. ``-m campaign`` has every mix with every row.
"""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from shardwise.core.comm import DONE
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.update.optimizer_in_backward import EarlyUpdates
from shardwise.testing import run_ranks
from tests.parity.batches import Batches, selected
from tests.parity.covering import Row
from tests.parity.faults import Patch, broken
from tests.parity.matrix import PLANS, complete, tolerance
from tests.parity.sharded import Run, Setting, check_runs, plain, train_all
from tests.parity.tiers import (
    BASE,
    FILLED,
    MIXES,
    OPTIMIZERS,
    STEPS,
    TierRow,
    TierRun,
    default_rows,
    goes,
    own_optimizers,
    quick_rows,
    setting_of,
    train_tiers,
)
from tests.support.models import MODELS
from tests.support.sets import full


def _not_written(word: str) -> Patch:
    """Records whose name begins with ``word`` are not changed after the second write."""
    writes: Counter[str] = Counter()

    @broken(DiskStore, "write")
    def write(real: Any, store: DiskStore, record: Any, buffer: torch.Tensor) -> Any:
        writes[record.name] += 1
        return DONE if record.name.startswith(word) and writes[record.name] > 2 else real(store, record, buffer)

    return write


@broken(Reducer, "_complete")
def host_gradients_not_added(real: Any, reducer: Reducer, state: ChunkGrads) -> None:
    """Only the last backward pass counts for gradients in the host tier."""
    if state.home is Tier.HOST:
        state.reduced = None
    real(reducer, state)


@broken(EarlyUpdates, "take_over")
def early_parameters_not_taken_over(*_: Any) -> None:
    """Parameters do not change by an update during backward whose state is on the disk."""


@broken(ChunkPool, "renew_later")
def late_renewal_forgotten(*_: Any) -> None:
    """Parameters that have to be renewed at their first use never are."""


class Fault(NamedTuple):
    """A fault: ``patch`` causes it, and ``shown_by`` is a mix of tiers and a part of a row that must detect it."""

    patch: Patch
    shown_by: tuple[str, Row]
    steps: int = 4


FAULTS: dict[str, Fault] = {
    "state_not_written": Fault(_not_written("optimizer state"), ("s_disk", {})),
    "host_gradients_not_added": Fault(host_gradients_not_added, ("s_host", {"micro": "3x"})),
    "early_parameters_not_taken_over": Fault(early_parameters_not_taken_over, ("s_disk", {"update": "backward"}), 2),
    "late_renewal_forgotten": Fault(late_renewal_forgotten, ("s_host", {"order": "on_use"}), 2),
}


def train_faulty(fault: str, settings: Sequence[Setting]) -> list[TierRun]:
    """Train on a rank of a pool with one fault, which is removed afterwards."""
    with FAULTS[fault].patch():
        return train_tiers(settings)


BATCH = 8
"""Rows that ranks run in one task."""

ROWS = sorted(default_rows(), key=lambda row: (row.row["ranks"], row.row["plan"], row.row["transport"]))
QUICK = quick_rows(ROWS)
IN_SETS = [each for row in ROWS for each in ([row] if row in QUICK else full(row))]


def _trainings(rows: Sequence[TierRow], directory: Path, size: int = BATCH) -> Batches[TierRow]:
    """Return the runs by mix, the one without offload first."""

    def settings_of(row: TierRow) -> list[Setting]:
        return [setting_of(row.row, mix, str(directory), row.steps) for mix in (None, *row.mixes)]

    return Batches({row.label: row for row in rows}, settings_of, train_tiers, size)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def trainings(request: pytest.FixtureRequest, directory: Path) -> Batches[TierRow]:
    return _trainings(selected(request), directory)


def same_bits(found: Sequence[TierRun], expected: Sequence[TierRun], what: str, norm_rtol: float = 0.0) -> None:
    """Check that all ranks of both have the same gradients and parameters, and each rank the same losses and norms."""
    first = expected[0].run
    for rank, (run, other) in enumerate(zip(found, expected, strict=True)):
        assert other.run.digest == first.digest, f"{what}: rank {rank} differs from rank 0 without offload"
        assert run.run.losses == other.run.losses, f"{what}: losses of rank {rank}"
        for norm, other_norm in zip(run.run.norms, first.norms, strict=True):
            assert norm is not None and other_norm is not None
            # NaN has to fail.
            assert abs(norm - other_norm) <= norm_rtol * other_norm, f"{what}: norms of rank {rank}"
        assert run.run.digest == first.digest, f"{what}: gradients or parameters of rank {rank}"
        assert not any(run.run.skipped)


def check_homes(run: TierRun, mix: str, row: Row) -> None:
    """Check the tiers: shares of 0 and 1 are exact; otherwise each tier has some data (but one chunk is in one
    tier)."""
    tiers = run.by_tier
    param_host, param_disk, state_host, state_disk = MIXES[mix]
    always = ("by_tensor",)  # small tensors stay on the device
    for share, tier, kinds in (
        (param_host, "host", ("parameters",)),
        (param_disk, "disk", ("parameters",)),
        (state_host, "host", ("masters", "optimizer state")),
        (state_disk, "disk", ("masters", "optimizer state")),
    ):
        held = sum(tiers.get(tier, {}).get(kind, 0) for kind in kinds)
        elsewhere = sum(found.get(kind, 0) for t, found in tiers.items() if t != tier for kind in kinds)
        if share == 0:
            assert held == 0, (mix, tier, kinds, tiers)
        if share == 1:
            assert held or not elsewhere, (mix, tier, kinds, tiers)
            assert elsewhere == 0 or (kinds == ("parameters",) and row["plan"] in always), (mix, tier, kinds, tiers)


@pytest.mark.parametrize("row", IN_SETS, ids=lambda row: row.label)
def test_tiers_change_no_bit(trainings: Batches[TierRow], directory: Path, row: TierRow) -> None:
    expected, *others = trainings.runs(row.label)
    for mix, found in zip(row.mixes, others, strict=True):
        same_bits(found, expected, f"{row.label} {mix}", row.norm_rtol)
        for run in found:
            check_homes(run, mix, row.row)
    assert not list(directory.iterdir())


def test_rows_cover_everything() -> None:
    assert sorted(default_rows(), key=lambda row: row.label) == sorted(ROWS, key=lambda row: row.label)
    runs = [(row.row, mix) for row in ROWS for mix in row.mixes]
    for factor, values in BASE.items():
        for value in values:
            assert {mix for row, mix in runs if row[factor] == value} == set(MIXES), (factor, value)
    for factor, names in (("model", MODELS), ("optimizer", OPTIMIZERS)):
        for on_disk in (False, True):
            found = {row[factor] for row, mix in runs if bool(MIXES[mix][3]) == on_disk}
            assert found == set(names), (factor, on_disk)
    whole = {(row.row["ranks"], row.row["numbers"]) for row in ROWS if row.steps == STEPS and row.row["micro"] == "3x"}
    assert whole == set(product(BASE["ranks"], BASE["numbers"]))
    assert {row["plan"] for row, _ in runs if row["ranks"] == "4"} == {"zero2", "zero3", "hybrid3"}
    assert {mix for row in QUICK for mix in row.mixes} == set(MIXES)
    for factor, values in BASE.items():
        assert {row.row[factor] for row in QUICK} >= set(values), factor


# ---- against plain training

EARLY = {"update": "backward", "clip": "unclipped"}
# Except for number formats, which the parity matrix compares without tiers.
PLAIN: list[tuple[str, Row]] = [
    ("thirds", {"plan": "zero1", "micro": "3x_no_sync", "model": "gpt"}),
    ("p_host_s_disk", {"plan": "by_tensor", "model": "mixture", **EARLY}),
    ("p_halves_s_disk", {"plan": "zero1", "model": "frozen", "optimizer": "peculiar"}),
]


@pytest.mark.parametrize(("mix", "part"), PLAIN, ids=[mix for mix, _ in PLAIN])
def test_tiers_equal_plain_training(mix: str, part: Row, tmp_path: Path) -> None:
    rest = {"ranks": "2", "numbers": "fp64", "optimizer": "adamw", "micro": "1x", "clip": "p2", "transport": "shared"}
    row = {**rest, **FILLED, **part}
    setting = setting_of(row, mix, str(tmp_path), steps=2)
    by_rank = run_ranks(setting.world_size, train_with_own, setting)
    with own_optimizers():
        check_runs(by_rank, plain(setting), setting, tolerance(row))


def train_with_own(setting: Any) -> Run:
    with own_optimizers():
        return train_all([setting])[0]


# ---- faults on purpose


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_tier_fails_the_check(fault: str, tmp_path: Path) -> None:
    mix, part = FAULTS[fault].shown_by
    rest = {"plan": "zero2", "ranks": "2", "numbers": "bf16", "micro": "1x", "clip": "unclipped", "transport": "shared"}
    row = {**rest, "model": "gpt", "optimizer": "adamw", "knobs": "usual", **part}
    settings = [setting_of(row, each, str(tmp_path), FAULTS[fault].steps) for each in (None, mix)]
    whole = run_ranks(settings[0].world_size, train_tiers, settings)
    same_bits([runs[1] for runs in whole], [runs[0] for runs in whole], "nothing is broken")
    broken = run_ranks(settings[0].world_size, train_faulty, fault, settings[1:])
    with pytest.raises(AssertionError):
        same_bits([runs[0] for runs in broken], [runs[0] for runs in whole], fault)


def test_every_part_of_a_tier_run_is_compared() -> None:
    def run(**changes: Any) -> list[TierRun]:
        return [TierRun(Run(losses=[[1.0]], norms=[2.0], skipped=[False], digest="a", **changes), {})]

    same_bits(run(), run(), "equal")
    for part, other in (("losses", [[1.5]]), ("norms", [float("nan")]), ("digest", "b"), ("skipped", [True])):
        found = run()
        setattr(found[0].run, part, other)
        with pytest.raises(AssertionError):
            same_bits(found, run(), part, 1e-12)


# ---- the large set


@pytest.mark.campaign
@pytest.mark.parametrize("numbers", ["fp64", *BASE["numbers"], "bf16_reduce32"])
@pytest.mark.parametrize("ranks", BASE["ranks"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_every_mix_with_every_model(plan: str, ranks: str, numbers: str, tmp_path: Path) -> None:
    choice = random.Random(f"{plan} {ranks} {numbers}")
    parts = [{"plan": plan, "ranks": ranks, "numbers": numbers, "model": model} for model in MODELS]
    given = [part for part in parts if goes(part)]
    factors = {**dict.fromkeys(parts[0], ()), **BASE, "optimizer": OPTIMIZERS}
    rows = [TierRow(tuple(complete(part, choice, factors, goes).items()), tuple(MIXES)) for part in given]
    if not rows:
        pytest.skip(f"{plan} needs 4 ranks")
    trainings = _trainings(rows, tmp_path, size=2)  # each with every mix
    failures: list[str] = []
    for row in rows:
        try:
            test_tiers_change_no_bit(trainings, tmp_path, row)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)
