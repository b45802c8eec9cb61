"""The parity matrix: sharded training against plain training in one process.

The full set has every model under every main plan at 2 ranks in fp64, and every pair of values of any two factors
somewhere (see :mod:`tests.parity.covering`): about 460 rows. The quick set has those about 36 of them that
:func:`~tests.parity.matrix.quick_rows` chooses: every model and every value of every other factor at least once.
``-m campaign`` runs every model under every plan at every rank count in every number format.
"""

import random
from collections.abc import Sequence

import pytest

from shardwise.testing import RankError, run_ranks
from tests.parity.covering import Row
from tests.parity.matrix import (
    FACTORS,
    MAX_NORM,
    allowed,
    default_rows,
    label,
    make_setting,
    plan_product,
    quick_rows,
    tolerance,
)
from tests.parity.sharded import Run, check_beside_rounding, plain, train_all, train_on_rank
from tests.support.models import MODELS
from tests.support.sets import full

BATCH = 24
"""Settings that ranks run in one task, so that they do not idle while the caller compares."""


def _by_mesh(row: Row) -> tuple[str, bool, bool, str]:
    return row["ranks"], row["plan"].startswith("hybrid"), row["plan"] == "ddp", row["transport"]


# Neighbours use one mesh, whose set-up takes as long as a training.
ROWS = sorted(default_rows(), key=_by_mesh)
QUICK = quick_rows(ROWS)


class Matrix:
    """Runs the selected rows in batches and keeps results until they are asked for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._waiting = {label(row): row for row in rows}
        self._done: dict[str, list[Run]] = {}

    def runs(self, row: Row) -> list[Run]:
        """By rank. Raises what the ranks raised."""
        key = label(row)
        if key not in self._done:
            others = [k for k, r in self._waiting.items() if r["ranks"] == row["ranks"] and k != key]
            self._run([key, *others[: BATCH - 1]])
        if key in self._done:
            return self._done.pop(key)
        # One of its batch failed, so it runs alone, and fails alone.
        return run_ranks(int(row["ranks"]), train_on_rank, make_setting(row))

    def _run(self, batch: Sequence[str]) -> None:
        rows = [self._waiting.pop(key) for key in batch if key in self._waiting]
        if not rows:
            return
        settings = [make_setting(row) for row in rows]
        try:
            by_rank: list[list[Run]] = run_ranks(int(rows[0]["ranks"]), train_all, settings, timeout=120.0)
        except RankError:
            return
        self._done.update((label(row), [runs[i] for runs in by_rank]) for i, row in enumerate(rows))


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Matrix:
    """The rows that this session selected."""
    here = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == request.path]
    return Matrix([i.callspec.params["row"] for i in here if "matrix" in i.fixturenames])


@pytest.mark.parametrize("row", [each for row in ROWS for each in ([row] if row in QUICK else full(row))], ids=label)
def test_sharded_training_equals_plain_training(matrix: Matrix, row: Row) -> None:
    setting = make_setting(row)
    runs = matrix.runs(row)
    expected = plain(setting)
    check_beside_rounding(runs, expected, setting, tolerance(row))
    assert row["clip"] == "unclipped" or min(expected.norms) > MAX_NORM  # else clipping was not tested


@pytest.mark.parametrize(("ranks", "numbers"), [("2", "fp32"), ("3", "bf16"), *full(("2", "bf16"), ("3", "fp32"))])
def test_transports_give_the_same_bits(ranks: str, numbers: str) -> None:
    row = _complete({"model": "gpt", "plan": "zero2", "ranks": ranks, "numbers": numbers}, random.Random(0))
    settings = [make_setting({**row, "transport": transport}) for transport in FACTORS["transport"]]
    (shared, gloo), *_ = run_ranks(int(ranks), train_all, settings)
    assert shared.digest == gloo.digest
    assert (shared.losses, shared.norms) == (gloo.losses, gloo.norms)


def _complete(part: Row, choice: random.Random) -> Row:
    """Any other values that go with ``part``."""
    row = dict(part)
    for factor, values in FACTORS.items():
        if factor not in row:
            row[factor] = choice.choice([v for v in values if allowed({**row, factor: v})])
    return {factor: row[factor] for factor in FACTORS}


@pytest.mark.campaign
@pytest.mark.parametrize("numbers", FACTORS["numbers"])
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
@pytest.mark.parametrize("plan", FACTORS["plan"])
def test_every_model_under_every_plan(plan: str, ranks: str, numbers: str) -> None:
    choice = random.Random(f"{plan} {ranks} {numbers}")
    rows = [_complete(part, choice) for part in plan_product((plan,), ranks, numbers)]
    if not rows:
        pytest.skip(f"{plan} needs 4 ranks")
    batches = Matrix(rows)
    failures = []
    for row in rows:
        try:
            setting = make_setting(row)
            check_beside_rounding(batches.runs(row), plain(setting), setting, tolerance(row))
        except (AssertionError, RankError) as error:
            failures.append(f"{label(row)}: {error}")
    assert not failures, f"{len(failures)} of {len(MODELS)}:\n" + "\n".join(failures)
