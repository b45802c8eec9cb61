"""The parity matrix: sharded training compared with plain training in one process.

The full set has every model under every main plan at 2 ranks in fp64, and every pair of values of any two factors (see
:mod:`tests.parity.covering`): about 460 rows. The quick set has about 36 of them, which
:func:`~tests.parity.matrix.quick_rows` chooses: every model and every value of every other factor at least once. ``-m
campaign`` runs every model under every plan at every rank count in every number format.
"""

import random
from collections.abc import Sequence

import pytest

from shardwise.testing import RankError, run_ranks
from tests.parity.batches import Batches, selected
from tests.parity.covering import Row
from tests.parity.matrix import (
    FACTORS,
    MAX_NORM,
    complete,
    default_rows,
    label,
    make_setting,
    plan_product,
    quick_rows,
    tolerance,
)
from tests.parity.sharded import check_beside_rounding, plain, train_all
from tests.support.models import MODELS
from tests.support.sets import full

BATCH = 24
"""Settings that ranks run in one task, so that they do not idle while the caller compares."""


def _by_mesh(row: Row) -> tuple[str, bool, bool, str]:
    return row["ranks"], row["plan"].startswith("hybrid"), row["plan"] == "ddp", row["transport"]


# Neighboring rows reuse one mesh, whose set-up takes as long as a training.
ROWS = sorted(default_rows(), key=_by_mesh)
QUICK = quick_rows(ROWS)


def _matrix(rows: Sequence[Row]) -> Batches[Row]:
    return Batches({label(row): row for row in rows}, lambda row: [make_setting(row)], train_all, BATCH)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Batches[Row]:
    return _matrix(selected(request))


@pytest.mark.parametrize("row", [each for row in ROWS for each in ([row] if row in QUICK else full(row))], ids=label)
def test_sharded_training_equals_plain_training(matrix: Batches[Row], row: Row) -> None:
    setting = make_setting(row)
    (runs,) = matrix.runs(label(row))
    expected = plain(setting)
    check_beside_rounding(runs, expected, setting, tolerance(row))
    assert row["clip"] == "unclipped" or min(expected.norms) > MAX_NORM  # otherwise clipping was not tested


@pytest.mark.parametrize(("ranks", "numbers"), [("2", "fp32"), ("3", "bf16"), *full(("2", "bf16"), ("3", "fp32"))])
def test_transports_give_the_same_bits(ranks: str, numbers: str) -> None:
    row = complete({"model": "gpt", "plan": "zero2", "ranks": ranks, "numbers": numbers}, random.Random(0))
    settings = [make_setting({**row, "transport": transport}) for transport in FACTORS["transport"]]
    (shared, gloo), *_ = run_ranks(int(ranks), train_all, settings)
    assert shared.digest == gloo.digest
    assert (shared.losses, shared.norms) == (gloo.losses, gloo.norms)


@pytest.mark.campaign
@pytest.mark.parametrize("numbers", FACTORS["numbers"])
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
@pytest.mark.parametrize("plan", FACTORS["plan"])
def test_every_model_under_every_plan(plan: str, ranks: str, numbers: str) -> None:
    choice = random.Random(f"{plan} {ranks} {numbers}")
    rows = [complete(part, choice) for part in plan_product((plan,), ranks, numbers)]
    if not rows:
        pytest.skip(f"{plan} needs 4 ranks")
    batches = _matrix(rows)
    failures = []
    for row in rows:
        try:
            setting = make_setting(row)
            (runs,) = batches.runs(label(row))
            check_beside_rounding(runs, plain(setting), setting, tolerance(row))
        except (AssertionError, RankError) as error:
            failures.append(f"{label(row)}: {error}")
    assert not failures, f"{len(failures)} of {len(MODELS)}:\n" + "\n".join(failures)
