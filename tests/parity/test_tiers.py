"""Where model data is at home changes no bit of any gradient or parameter: steps under every mix of tiers.

Each row is trained without offload and under several mixes of device, host and disk. In the full set (34 rows, 88 runs
with a mix) every pair of values of two factors occurs, every mix with every value, and every optimizer and model with
state in memory and on the disk. The quick set has those 10 rows that :func:`~tests.parity.tiers.quick_rows` chooses:
every mix and every value of a factor other than model and optimizer at least once. ``-m campaign`` has every mix with
every row.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.core.comm import DONE
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.pool import ChunkPool
from shardwise.core.update.early import EarlyUpdates
from shardwise.testing import run_ranks
from tests.parity.covering import Row
from tests.parity.matrix import PLANS, tolerance
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


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _not_written(word: str) -> Callable[[], Any]:
    """Records whose name begins with ``word`` stay as they were after the second write."""

    def patch() -> Any:
        writes: dict[str, int] = {}

        def make(real: Any) -> Any:
            def write(self: DiskStore, record: Any, buffer: torch.Tensor) -> Any:
                writes[record.name] = writes.get(record.name, 0) + 1
                return DONE if record.name.startswith(word) and writes[record.name] > 2 else real(self, record, buffer)

            return write

        return _wrap(DiskStore, "write", make)

    return patch


def _host_gradients_not_added() -> Any:
    """Only the last backward pass counts for gradients that are at home on the host."""

    def make(real: Any) -> Any:
        def complete(self: Reducer, state: ChunkGrads) -> None:
            if state.home is Tier.HOST:
                state.reduced = None
            real(self, state)

        return complete

    return _wrap(Reducer, "_complete", make)


def _early_parameters_not_taken_over() -> Any:
    """Parameters stay as before an update during backward whose state is on the disk."""
    return mock.patch.object(EarlyUpdates, "take_over", lambda self, chunks: None)


def _late_renewal_forgotten() -> Any:
    """Parameters that are to be renewed at their first use never are."""

    def renew_later(self: ChunkPool, chunk: Any, pending: Any) -> None:
        pass

    return mock.patch.object(ChunkPool, "renew_later", renew_later)


@dataclass(frozen=True)
class Fault:
    """``patch`` makes it; ``shown_by`` is a mix of tiers and a part of a row under which it must be noticed."""

    patch: Callable[[], Any]
    shown_by: tuple[str, Row]
    steps: int = 4


FAULTS: dict[str, Fault] = {
    "state_not_written": Fault(_not_written("optimizer state"), ("s_disk", {})),
    "host_gradients_not_added": Fault(_host_gradients_not_added, ("s_host", {"micro": "3x"})),
    "early_parameters_not_taken_over": Fault(_early_parameters_not_taken_over, ("s_disk", {"update": "backward"}), 2),
    "late_renewal_forgotten": Fault(_late_renewal_forgotten, ("s_host", {"order": "on_use"}), 2),
}


def train_faulty(fault: str, settings: Sequence[Setting]) -> list[TierRun]:
    """Runs on every rank of a pool: trainings with one fault. Nothing of it stays."""
    with FAULTS[fault].patch():
        return train_tiers(settings)


BATCH = 8
"""Rows that ranks run in one task."""

ROWS = sorted(default_rows(), key=lambda row: (row.row["ranks"], row.row["plan"], row.row["transport"]))
QUICK = quick_rows(ROWS)
IN_SETS = [each for row in ROWS for each in ([row] if row in QUICK else full(row))]


class Trainings:
    """Runs the selected rows in batches and keeps results until they are asked for."""

    def __init__(self, rows: Sequence[TierRow], directory: Path, batch: int = BATCH) -> None:
        self._batch = batch
        self._waiting = {row.label: row for row in rows}
        self._done: dict[str, list[list[TierRun]]] = {}
        self.directory = directory

    def runs(self, row: TierRow) -> list[list[TierRun]]:
        """By mix, the run without offload first; by rank."""
        if row.label not in self._done:
            same = [r for r in self._waiting.values() if r.row["ranks"] == row.row["ranks"] and r != row]
            self._run([row, *same[: self._batch - 1]])
        return self._done.pop(row.label)

    def _run(self, rows: Sequence[TierRow]) -> None:
        where = str(self.directory)
        settings = [setting_of(r.row, mix, where, r.steps) for r in rows for mix in (None, *r.mixes)]
        by_rank: list[list[TierRun]] = run_ranks(settings[0].world_size, train_tiers, settings, timeout=180.0)
        at = 0
        for row in rows:
            stop = at + 1 + len(row.mixes)
            self._done[row.label] = [[runs[i] for runs in by_rank] for i in range(at, stop)]
            self._waiting.pop(row.label, None)
            at = stop


@pytest.fixture(scope="module")
def trainings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """The rows that this session selected."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    rows = [i.callspec.params["row"] for i in items if "trainings" in getattr(i, "fixturenames", ())]
    return Trainings(rows, tmp_path_factory.mktemp("disk"))


def same_bits(found: Sequence[TierRun], expected: Sequence[TierRun], what: str, norm_rtol: float = 0.0) -> None:
    """All ranks of both have the same gradients of every step and parameters, and each rank its losses and norms."""
    first = expected[0].run
    for rank, (run, other) in enumerate(zip(found, expected, strict=True)):
        assert other.run.digest == first.digest, f"{what}: rank {rank} differs from rank 0 without offload"
        assert run.run.losses == other.run.losses, f"{what}: losses of rank {rank}"
        for norm, other_norm in zip(run.run.norms, first.norms, strict=True):
            assert norm is not None and other_norm is not None
            # Written so that NaN fails.
            assert abs(norm - other_norm) <= norm_rtol * other_norm, f"{what}: norms of rank {rank}"
        assert run.run.digest == first.digest, f"{what}: gradients or parameters of rank {rank}"
        assert not any(run.run.skipped)


def check_homes(run: TierRun, mix: str, row: Row) -> None:
    """Shares of 0 and 1 are exact; some data is where the others say (but one chunk cannot be in two places)."""
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
def test_tiers_change_no_bit(trainings: Trainings, row: TierRow) -> None:
    expected, *others = trainings.runs(row)
    for mix, found in zip(row.mixes, others, strict=True):
        same_bits(found, expected, f"{row.label} {mix}", row.norm_rtol)
        for run in found:
            check_homes(run, mix, row.row)
    assert not list(trainings.directory.iterdir())


def test_the_rows_have_everything() -> None:
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
PLAIN: list[tuple[str, Row]] = [
    ("thirds", {"plan": "zero1", "ranks": "2", "numbers": "fp64", "micro": "3x_no_sync", "model": "gpt"}),
    ("s_disk", {"plan": "zero2", "ranks": "2", "numbers": "bf16", "model": "odd_sizes", "order": "on_use"}),
    ("all_disk", {"plan": "zero3", "ranks": "2", "numbers": "bf16", "micro": "3x", "model": "residual"}),
    ("p_disk_s_host", {"plan": "zero3", "ranks": "2", "numbers": "fp16", "model": "mlp", "optimizer": "adam"}),
    ("all_host", {"plan": "budget0.3", "ranks": "2", "numbers": "fp32", "model": "tied", **EARLY}),
    ("p_disk", {"plan": "zero2", "ranks": "1", "numbers": "fp64", "model": "mixed_fp64", "optimizer": "adagrad"}),
    ("p_host_s_disk", {"plan": "by_tensor", "ranks": "2", "numbers": "fp64", "model": "mixture", **EARLY}),
    ("p_halves_s_disk", {"plan": "zero1", "ranks": "2", "numbers": "fp64", "model": "frozen", "optimizer": "peculiar"}),
]


@pytest.mark.parametrize(("mix", "part"), PLAIN, ids=[mix for mix, _ in PLAIN])
def test_tiers_equal_plain_training(mix: str, part: Row, tmp_path: Path) -> None:
    rest = {"optimizer": "adamw", "micro": "1x", "clip": "p2", "transport": "shared"}
    row = {**rest, **FILLED, **part}
    setting = setting_of(row, mix, str(tmp_path), steps=2)
    by_rank = run_ranks(setting.world_size, train_with_own, setting)
    with own_optimizers():
        check_runs(by_rank, plain(setting), setting, tolerance(row))


def train_with_own(setting: Any) -> Run:
    with own_optimizers():
        return train_all([setting])[0]


# ---- broken on purpose


# One that is not written, one of gradients, one of an update during backward, and one of what is used later.
QUICK_FAULTS = (
    "state_not_written",
    "host_gradients_not_added",
    "early_parameters_not_taken_over",
    "late_renewal_forgotten",
)


@pytest.mark.parametrize("fault", [*QUICK_FAULTS, *full(*(fault for fault in FAULTS if fault not in QUICK_FAULTS))])
def test_a_broken_tier_fails_the_check(fault: str, tmp_path: Path) -> None:
    mix, part = FAULTS[fault].shown_by
    rest = {"plan": "zero2", "ranks": "2", "numbers": "bf16", "micro": "1x", "clip": "unclipped", "transport": "shared"}
    row = {**rest, "model": "gpt", "optimizer": "adamw", "knobs": "usual", **part}
    settings = [setting_of(row, each, str(tmp_path), FAULTS[fault].steps) for each in (None, mix)]
    whole = run_ranks(settings[0].world_size, train_tiers, settings)
    same_bits([runs[1] for runs in whole], [runs[0] for runs in whole], "nothing is broken")
    broken = run_ranks(settings[0].world_size, train_faulty, fault, settings[1:])
    with pytest.raises(AssertionError):
        same_bits([runs[0] for runs in broken], [runs[0] for runs in whole], fault)


def test_every_part_of_a_run_is_compared() -> None:
    def run(**changes: Any) -> list[TierRun]:
        return [TierRun(Run(losses=[[1.0]], norms=[2.0], skipped=[False], digest="a", **changes), {})]

    same_bits(run(), run(), "equal")
    for part, other in (("losses", [[1.5]]), ("norms", [float("nan")]), ("digest", "b"), ("skipped", [True])):
        found = run()
        setattr(found[0].run, part, other)
        with pytest.raises(AssertionError):
            same_bits(found, run(), part, 1e-12)


# ---- the large set


def _campaign_row(plan: str, ranks: str, numbers: str, choice: random.Random) -> list[TierRow]:
    rows = []
    for model in MODELS:
        row = {"plan": plan, "ranks": ranks, "numbers": numbers, "model": model}
        for factor, values in {**BASE, "optimizer": OPTIMIZERS}.items():
            if factor not in row:
                row[factor] = choice.choice([v for v in values if goes({**row, factor: v})])
        if goes(row):
            rows.append(TierRow(tuple(row.items()), tuple(MIXES)))
    return rows


@pytest.mark.campaign
@pytest.mark.parametrize("numbers", ["fp64", *BASE["numbers"], "bf16_reduce32"])
@pytest.mark.parametrize("ranks", BASE["ranks"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_every_mix_with_every_model(plan: str, ranks: str, numbers: str, tmp_path: Path) -> None:
    rows = _campaign_row(plan, ranks, numbers, random.Random(f"{plan} {ranks} {numbers}"))
    if not rows:
        pytest.skip(f"{plan} needs 4 ranks")
    trainings = Trainings(rows, tmp_path, batch=2)  # each with every mix
    failures: list[str] = []
    for row in rows:
        _collect(failures, lambda row=row: test_tiers_change_no_bit(trainings, row))
    assert not failures, "\n".join(failures)


def _collect(failures: list[str], check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        failures.append(str(error))
