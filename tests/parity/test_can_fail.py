"""The checks fail when the engine is wrong: each fault is one that a sharded engine has had somewhere."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

from shardwise.testing import run_ranks
from tests.parity.broken import FAULTS, train_broken
from tests.parity.covering import Row
from tests.parity.matrix import make_setting, tolerance
from tests.parity.sharded import Run, Setting, check_beside_rounding, check_runs, plain, rounding
from tests.support.sets import full

PLAIN_ROW: Row = {
    "model": "residual",
    "plan": "zero2",
    "ranks": "2",
    "numbers": "fp64",
    "optimizer": "adamw",
    "micro": "1x",
    "clip": "unclipped",
    "transport": "shared",
    "average": "sum",
    "order": "overlap",
}
SETTINGS: dict[str, Row] = {
    "one_reduction_skipped": {"plan": "zero3"},
    "not_unscaled": {"numbers": "fp16"},
    "gradient_of_rank_1_forgotten": {},
    "norm_of_each_rank": {"clip": "p2"},
    "earlier_passes_dropped": {"micro": "3x"},
    "replicas_not_averaged": {"plan": "hybrid2", "ranks": "4"},
    "no_masters": {"numbers": "bf16"},
    "replicas_drift": {"plan": "ddp"},
}


# Those for which each kind of check is needed: of gradients, of norms, of sums over passes and of number formats.
QUICK = (
    "one_reduction_skipped",
    "not_unscaled",
    "gradient_of_rank_1_forgotten",
    "norm_of_each_rank",
    "earlier_passes_dropped",
    "no_masters",
    "replicas_drift",
)


def _run(fault: str, row: Row) -> tuple[list[Run], Setting]:
    setting = make_setting(row)
    runs: list[Run] = run_ranks(setting.world_size, train_broken, fault, setting)
    return runs, setting


@functools.cache
def _run_of(*items: tuple[str, str]) -> tuple[list[Run], Setting]:
    return _run("nothing", dict(items))


def _whole(row: Row) -> tuple[list[Run], Setting]:
    """Of a run without a fault, which several tests change: a copy."""
    return copy.deepcopy(_run_of(*row.items()))


def test_every_fault_has_a_setting() -> None:
    assert set(SETTINGS) | {"nothing"} == set(FAULTS)


@pytest.mark.parametrize("fault", [*QUICK, *full(*(fault for fault in SETTINGS if fault not in QUICK))])
def test_a_broken_engine_fails_the_check(fault: str) -> None:
    row = {**PLAIN_ROW, **SETTINGS[fault]}
    runs, setting = _whole(row)
    check_runs(runs, plain(setting), setting, tolerance(row))
    runs, setting = _run(fault, row)
    with pytest.raises(AssertionError):
        check_runs(runs, plain(setting), setting, tolerance(row))


@pytest.mark.parametrize("off_by", [0.0, float("nan")])
@pytest.mark.parametrize("part", ["losses", "norms", "gradients", "parameters", "digest"])
def test_every_part_of_a_run_is_checked(part: str, off_by: float) -> None:
    row = {**PLAIN_ROW, "numbers": "fp64"}
    runs, setting = _whole(row)
    first = runs[0]
    if part == "losses":
        first.losses[1][0] *= 1 + 1e-11 + off_by
    elif part == "norms":
        for run in runs:
            run.norms = [n and n * (1 + 1e-11 + off_by) for n in run.norms]
    elif part == "digest":
        runs[1] = replace(runs[1], digest="other")
    else:
        tensors = first.parameters if part == "parameters" else first.gradients[1]
        name = next(iter(tensors))
        tensors[name] = tensors[name] * torch.tensor(1 + 1e-11 + off_by, dtype=torch.float64)
    with pytest.raises(AssertionError):
        check_runs(runs, plain(setting), setting, tolerance(row))


def test_what_plain_training_does_not_round_is_no_rounding() -> None:
    row = {**PLAIN_ROW, "numbers": "fp32"}
    runs, setting = _whole(row)
    check_beside_rounding(runs, plain(setting), setting, tolerance(row))
    name, gradient = next(iter(runs[0].gradients[1].items()))
    runs[0].gradients[1][name] = gradient * (1 + 5e-6)
    assert 0 < 2 * rounding(setting, tolerance(row).share) < 4e-6
    with pytest.raises(AssertionError, match="gradients of"):
        check_beside_rounding(runs, plain(setting), setting, tolerance(row))


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [("sgd", "elements are rounded otherwise"), *full(("adamw", "gradients of residual step 1"), ("nadam", "step 1"))],
)
def test_masters_that_nobody_asked_for_are_noticed(optimizer: str, where: str) -> None:
    """An engine without masters against plain training with them, rounded at the end."""
    row = {**PLAIN_ROW, "numbers": "bf16_no_master", "optimizer": optimizer}
    runs, setting = _whole(row)
    check_runs(runs, plain(setting), setting, tolerance(row))
    plan = setting.plan.but(master_weights=True)
    expected = plain(replace(setting, plan=plan))
    rounded = [{name: value.bfloat16() for name, value in step.items()} for step in expected.masters]
    with pytest.raises(AssertionError, match=where):
        check_runs(runs, replace(expected, masters=rounded), setting, tolerance(row))
