"""The parity checks fail when the engine is wrong: each fault here is one that a sharded engine has had."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import DONE, Buffer, Group
from shardwise.core.engine import optimizer as optimizer_module
from shardwise.core.engine import placement
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer
from shardwise.testing import run_ranks
from tests.parity.covering import Row
from tests.parity.faults import Patch, broken
from tests.parity.matrix import make_setting, tolerance
from tests.parity.sharded import Run, Setting, check_beside_rounding, check_runs, plain, rounding, train_on_rank
from tests.support.on_ranks import raises
from tests.support.sets import full


def _all_kinds(kind: type) -> list[type]:
    return [kind, *(k for child in kind.__subclasses__() for k in _all_kinds(child))]


@contextlib.contextmanager
def one_reduction_skipped() -> Iterator[None]:
    """The fourth reduction returns this rank's own gradient."""
    calls = itertools.count()

    def skip(real: Any, self: Group, out: torch.Tensor, full: Any, scale: float) -> Any:
        if next(calls) != 3:
            return real(self, out, full, scale)
        out.copy_(full.local.view(self.size, -1)[self.rank] * (scale * self.size))
        return DONE

    with contextlib.ExitStack() as stack:
        for kind in _all_kinds(Group):
            if "reduce_scatter" in vars(kind):
                stack.enter_context(broken(kind, "reduce_scatter")(skip)())
        yield


@broken(ShardedOptimizer, "divisor")
def not_unscaled(_real: Any, _optimizer: ShardedOptimizer) -> float:
    return 1.0


@broken(Reducer, "add")
def gradient_of_rank_1_forgotten(
    real: Any, reducer: Reducer, state: ChunkGrads, index: int, grad: torch.Tensor, sync: bool
) -> None:
    real(reducer, state, index, torch.zeros_like(grad) if dist.get_rank() == 1 else grad, sync)


@broken(optimizer_module, "global_norm")
def norm_of_each_rank(real: Any, tensors: Any, p: float, ask: Callable[[float, bool], float], *others: Any) -> float:
    """Every rank clips by the norm of its own shards."""

    def alone(share: float, largest: bool) -> float:
        ask(share, largest)  # the other ranks wait for it
        return share

    return float(real(tensors, p, alone, *others))


@broken(Reducer, "_complete")
def earlier_passes_dropped(real: Any, reducer: Reducer, state: ChunkGrads) -> None:
    """Only the last backward pass of a step counts."""
    state.reduced = None
    real(reducer, state)


@broken(Reducer, "_issue")
def replicas_not_averaged(real: Any, reducer: Reducer, state: ChunkGrads, bucket: Buffer) -> None:
    """The mean is taken over the shard group instead of all ranks."""
    reducer._scale = 1.0 / reducer.mesh.shard.size
    real(reducer, state, bucket)


@broken(placement, "master_dtype")
def no_masters(*_: Any) -> None:
    pass


@broken(ParameterValues, "publish")
def replicas_drift(real: Any, values: ParameterValues, *args: Any, **how: Any) -> None:
    """Rank 1's parameters change in the last bit, which every tolerance would allow."""
    real(values, *args, **how)
    for chunk in values.shards.chunks:
        if dist.get_rank() == 1 and chunk.full is not None:
            chunk.full.mul_(1 + 2**-52)


FAULTS: dict[str, tuple[Patch, Row]] = {
    "one_reduction_skipped": (one_reduction_skipped, {"plan": "zero3"}),
    "not_unscaled": (not_unscaled, {"numbers": "fp16"}),
    "gradient_of_rank_1_forgotten": (gradient_of_rank_1_forgotten, {}),
    "norm_of_each_rank": (norm_of_each_rank, {"clip": "p2"}),
    "earlier_passes_dropped": (earlier_passes_dropped, {"micro": "3x"}),
    "replicas_not_averaged": (replicas_not_averaged, {"plan": "hybrid2", "ranks": "4"}),
    "no_masters": (no_masters, {"numbers": "bf16"}),
    "replicas_drift": (replicas_drift, {"plan": "ddp"}),
}
"""Faults, each with the values that detect it in addition to :data:`PLAIN_ROW`."""


def train_broken(fault: str, setting: Setting) -> Run:
    """Train on a rank of a pool with one fault, or with none (``""``); the fault is removed afterwards."""
    with FAULTS[fault][0]() if fault else contextlib.nullcontext():
        return train_on_rank(setting)


PLAIN_ROW: Row = {"model": "residual", "plan": "zero2", "ranks": "2", "numbers": "fp64", "optimizer": "adamw"}
PLAIN_ROW |= {"micro": "1x", "clip": "unclipped", "transport": "shared", "average": "sum", "order": "overlap"}


def _run(fault: str, row: Row) -> tuple[list[Run], Setting]:
    setting = make_setting(row)
    runs: list[Run] = run_ranks(setting.world_size, train_broken, fault, setting)
    return runs, setting


@functools.cache
def _run_of(*items: tuple[str, str]) -> tuple[list[Run], Setting]:
    return _run("", dict(items))


def _whole(row: Row) -> tuple[list[Run], Setting]:
    """Return a copy of a run without a fault, since tests change it."""
    return copy.deepcopy(_run_of(*row.items()))


# Faults for each kind of check: of gradients, of norms, of sums over passes, and of number formats.
@pytest.mark.parametrize(
    "fault", [fault for each in FAULTS for fault in (full(each) if "averaged" in each else [each])]
)
def test_broken_engine_fails_the_check(fault: str) -> None:
    row = {**PLAIN_ROW, **FAULTS[fault][1]}
    runs, setting = _whole(row)
    check_runs(runs, plain(setting), setting, tolerance(row))
    runs, setting = _run(fault, row)
    raises(AssertionError, None, lambda: check_runs(runs, plain(setting), setting, tolerance(row)))


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
    raises(AssertionError, None, lambda: check_runs(runs, plain(setting), setting, tolerance(row)))


def test_error_above_rounding_fails_the_check() -> None:
    row = {**PLAIN_ROW, "numbers": "fp32"}
    runs, setting = _whole(row)
    check_beside_rounding(runs, plain(setting), setting, tolerance(row))
    name, gradient = next(iter(runs[0].gradients[1].items()))
    runs[0].gradients[1][name] = gradient * (1 + 5e-6)
    assert 0 < 2 * rounding(setting, tolerance(row).share) < 4e-6
    raises(AssertionError, "gradients of", lambda: check_beside_rounding(runs, plain(setting), setting, tolerance(row)))


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [("sgd", "elements are rounded otherwise"), *full(("adamw", "gradients of residual step 1"), ("nadam", "step 1"))],
)
def test_unexpected_masters_are_detected(optimizer: str, where: str) -> None:
    """Compare an engine without masters with plain training that has them, rounded at the end."""
    row = {**PLAIN_ROW, "numbers": "bf16_no_master", "optimizer": optimizer}
    runs, setting = _whole(row)
    check_runs(runs, plain(setting), setting, tolerance(row))
    plan = setting.plan.but(master_weights=True)
    expected = plain(replace(setting, plan=plan))
    rounded = [{name: value.bfloat16() for name, value in step.items()} for step in expected.masters]
    raises(AssertionError, where, lambda: check_runs(runs, replace(expected, masters=rounded), setting, tolerance(row)))
