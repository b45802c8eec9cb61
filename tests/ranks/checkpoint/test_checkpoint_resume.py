"""Resumed runs: bit-identical to the uninterrupted run at the same world size, close to it at any other."""

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.checkpoint.formats.native import verify
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.checkpoint_setup import Run, close_to, differences, everything, plans, start
from tests.support.engine_setup import one_mesh
from tests.support.models import MODELS
from tests.support.sets import campaign, full

SAVED_AFTER = 2
Cell = tuple[str, str, str, str]
"""A model, its optimizer, the plan that saves and the plan that loads."""


def _begin(model: str, optimizer: str, plan: Plan, mesh: Mesh, **how: Any) -> Run:
    return start(lambda m, o, p: build(m, o, p, mesh), model, optimizer, plan, **how)


def _stop(run: Run) -> None:
    run.saver.close()
    run.session.close()


def resume(root: str, cell: Cell, mesh: Mesh, use_async: bool, steps: int) -> None:
    """Train, save and train on for ``steps``; then start from other weights, load, and compare the same steps."""
    model, optimizer, save, load = cell
    named = plans(root + "-disk")
    first = _begin(model, optimizer, named[save], mesh, batches=mesh.size)
    first.steps(0, SAVED_AFTER)
    persistent = first.session.module.state_layout()
    for name, buffer in first.session.module.unwrap().named_buffers():
        if name in persistent:
            buffer.add_(1 + mesh.rank)  # buffers may differ between ranks
    given: dict[str, Any] = {"data_position": {"next": SAVED_AFTER, "rank": mesh.rank}}
    given["user_state"] = ("mine", torch.arange(3))
    first.saver.save(root, lr_schedulers=first.schedulers, use_async=use_async, **given)
    losses = first.steps(SAVED_AFTER, SAVED_AFTER + steps)
    state = everything(first.session)
    _stop(first)

    second = _begin(model, optimizer, named[load], mesh, seed=5, batches=mesh.size)
    second.steps(50, 51)  # the load replaces this state
    restored = second.saver.load(root, lr_schedulers=second.schedulers)
    assert restored is not None and restored.data_position == given["data_position"] and restored.step == SAVED_AFTER
    assert restored.user_state[0] == "mine" and restored.user_state[1].tolist() == [0, 1, 2]
    at = restored.data_position["next"]
    assert second.steps(at, at + steps) == losses, cell
    assert not differences(everything(second.session), state), cell
    assert second.saver.steps == SAVED_AFTER + steps
    _stop(second)


def resume_many(root: str, cells: list[Cell], use_async: bool, steps: int) -> None:
    with one_mesh(plans(root)[cells[0][2]]) as mesh:
        for index, cell in enumerate(cells):
            resume(os.path.join(root, str(index)), cell, mesh, use_async, steps)


def _check(root: Path, world_size: int, cells: list[Cell], use_async: bool = False, steps: int = 1) -> None:
    """Run :func:`resume`: one step tests what was restored, two also what the first step left in tiers and scaler."""
    run_ranks(world_size, resume_many, str(root), cells, use_async, steps, timeout=240.0)
    for index, cell in enumerate(cells):
        assert verify(root / str(index) / f"step-{SAVED_AFTER}") == [], cell


RESIDENT = ["frozen", "all_frozen_child", "unused", "zero_sized", "mixed_bf16", "buffers", "scalar", "mixture", "tied"]
ELSEWHERE = {*RESIDENT, "gpt", "odd_sizes", "mixed_fp64"}  # including the models of other world sizes and tiers
IN_LAYOUT = ["mlp", "alias", "late_parameter", "non_contiguous", "lstm"]
IN_FORWARD = [model for model in MODELS if model not in {*ELSEWHERE, *IN_LAYOUT}]
"""Models with an unusual forward but an ordinary checkpoint: one rank is enough to show that they resume."""


@pytest.mark.parametrize(
    ("plan", "models", "world_size", "steps"),
    [
        ("zero3", IN_LAYOUT, 2, 1),
        ("zero1", RESIDENT[::2], 2, 1),
        *full(("zero1", RESIDENT[1::2], 2, 1), ("zero3", IN_FORWARD, 1, 1)),
        *campaign(("zero3", list(MODELS), 2, 2)),
    ],
    ids=["layout", "resident", "resident others", "forward", "all"],
)
def test_every_model_resumes_bit_for_bit(
    tmp_path: Path, plan: str, models: list[str], world_size: int, steps: int
) -> None:
    _check(tmp_path, world_size, [(model, "adamw", plan, plan) for model in models], steps=steps)


SAME = ("mixed", "state disk", "straddling", "tensor", "disk")
TIERS = [("gpt", save, load) for save, load in pairwise(["zero3", "host", "disk", "zero3"])]
TIERS += [(("unused", "gpt")[index % 2], name, name) for index, name in enumerate(SAME[:4])]
OTHER_TIERS = [(("gpt", "unused")[index % 2], name, name) for index, name in enumerate(SAME)]


@pytest.mark.parametrize(
    ("optimizer", "cells"),
    [
        ("adamw", TIERS[1:4]),
        *full(("adamw", TIERS[:1] + TIERS[4:])),
        *campaign(("adamw", OTHER_TIERS), ("sgd", TIERS + OTHER_TIERS), ("two", TIERS + OTHER_TIERS)),
    ],
    ids=["adamw", "adamw more", "adamw others", "sgd", "two"],
)
def test_every_tier_resumes_from_every_other(tmp_path: Path, optimizer: str, cells: list[tuple[str, str, str]]) -> None:
    """All stages and tiers compute the same bits with the same packing."""
    _check(tmp_path, 2, [(model, optimizer, save, load) for model, save, load in cells], steps=2)


HALF: list[list[Cell]] = [
    [("gpt", "adamw", "bf16", "bf16 disk"), ("odd_sizes", "sgd", "fp16", "fp16")],
    [("odd_sizes", "adamw", "bf16 disk", "bf16"), ("gpt", "adamw", "fp16", "fp16")],
    [("gpt", "adamw", "bf16 disk", "bf16"), ("gpt", "sgd", "fp16", "fp16"), ("odd_sizes", "adamw", "fp16", "fp16")],
]


@pytest.mark.parametrize("cells", [HALF[0], *full(HALF[1]), *campaign(HALF[2])])
def test_half_precision_and_scaler_resume_bit_for_bit(tmp_path: Path, cells: list[Cell]) -> None:
    _check(tmp_path, 2, cells, steps=2)


OF_SIZES = ("gpt", "odd_sizes", "zero_sized", "mixed_fp64", "scalar", "frozen", "buffers")


@pytest.mark.parametrize(
    ("world_size", "models", "steps"),
    [
        (1, ("gpt", "odd_sizes", "zero_sized", "mixed_fp64"), 1),
        *full((3, ("odd_sizes", "mixed_fp64", "scalar", "frozen", "buffers"), 1)),
        *campaign((1, OF_SIZES, 2), (3, OF_SIZES, 2)),
    ],
    ids=["1", "3", "1 all", "3 all"],
)
def test_other_world_sizes_resume_bit_for_bit(
    tmp_path: Path, world_size: int, models: tuple[str, ...], steps: int
) -> None:
    # The campaign runs each model with both combinations.
    ways = [("adamw", "zero3"), ("two", "disk")][:: 1 if world_size == 3 else -1]
    chosen = [(model, *ways[OF_SIZES.index(model) % 2]) for model in models]
    _check(tmp_path, world_size, [(model, optimizer, plan, plan) for model, optimizer, plan in chosen], steps=steps)


@pytest.mark.parametrize(
    ("model", "optimizer", "steps"), [("gpt", "adamw", 1), *campaign(("unused", "two", 2))], ids=["gpt", "unused"]
)
def test_replicas_share_the_writes(tmp_path: Path, model: str, optimizer: str, steps: int) -> None:
    _check(tmp_path / "hybrid", 4, [(model, optimizer, "hybrid", "hybrid")], steps=steps)
    sizes = [file.stat().st_size for file in (tmp_path / "hybrid" / "0" / f"step-{SAVED_AFTER}").glob("pieces-*")]
    assert len(sizes) == 4 and (model != "gpt" or max(sizes) < 2 * min(sizes))


@pytest.mark.parametrize("saved", [("zero3",), *full((("disk", "gloo"),))], ids=" ".join)
def test_asynchronous_saves_write_the_state_at_the_call(tmp_path: Path, saved: tuple[str, ...]) -> None:
    _check(tmp_path, 2, [("gpt", "adamw", plan, plan) for plan in saved], use_async=True, steps=2)


# ---- other world sizes, stages, packings and precisions


def save_at(root: str, model: str, optimizer: str, plan: str, how: dict[str, Any], later: int) -> list[list[float]]:
    with one_mesh(plans(root)[plan]) as mesh:
        run = _begin(model, optimizer, plans(root + "-disk")[plan], mesh, **how, noise=False)
        run.steps(0, SAVED_AFTER)
        run.saver.save(root, f"{plan} {mesh.size}", lr_schedulers=run.schedulers, data_position=SAVED_AFTER)
        losses = run.steps(SAVED_AFTER, SAVED_AFTER + later)
        _stop(run)
        return [losses]


def go_on_at(
    root: str, model: str, optimizer: str, tag: str, loads: list[str], how: dict[str, Any], later: int
) -> list[list[float]]:
    found = []
    for plan in loads:
        with one_mesh(plans(root)[plan]) as mesh:
            run = _begin(model, optimizer, plans(root + "-disk")[plan], mesh, **how, seed=9, noise=False)
            restored = run.saver.load(root, tag, lr_schedulers=run.schedulers)
            assert restored is not None and restored.data_position == SAVED_AFTER
            found.append(run.steps(SAVED_AFTER, SAVED_AFTER + later))
            _stop(run)
    return found


def _sums(by_rank: list[list[list[float]]]) -> list[list[float]]:
    """Return the loss of each step by plan, summed over all batches."""
    return [[sum(step) for step in zip(*runs, strict=True)] for runs in zip(*by_rank, strict=True)]


PAIRS = [(4, 3), (2, 1), (1, 4), (3, 2)]
RESHARDS = [(3, 1, slice(1, None, 2), 4), *full((4, 2, slice(0, None, 2), 4))]
RESHARDS += campaign(*((*pair, slice(None), 10) for pair in [(4, 2), (3, 1), *PAIRS]))
"""World sizes, the plans of each case that load (by default each plan once), and the number of compared losses."""
CASES = [
    ("gpt", "adamw", "zero3", ["zero1", "zero3", "straddling", "tensor", "disk", "mixed", "ddp"]),
    ("unused", "two", "mixed", ["zero2", "disk"]),
    ("odd_sizes", "sgd", "zero2", ["straddling", "zero3"]),
]


@pytest.mark.parametrize(("before", "after", "part", "later"), RESHARDS)
def test_any_world_size_and_stage_resumes_from_any_other(
    tmp_path: Path, before: int, after: int, part: slice, later: int
) -> None:
    """In fp64 only the order of sums differs, so the next losses agree to 1e-9."""
    how = {"dtype": torch.float64, "batches": math.lcm(before, after)}
    for model, optimizer, plan, loads in CASES:
        root, tag = str(tmp_path / model), f"{plan} {before}"
        names = [*loads, "hybrid"][part] if after == 4 else loads[part]
        saved = run_ranks(before, save_at, root, model, optimizer, plan, how, later, timeout=120.0)
        expected = _sums(saved)[0]
        found = run_ranks(after, go_on_at, root, model, optimizer, tag, names, how, later, timeout=240.0)
        for name, losses in zip(names, _sums(found), strict=True):
            assert close_to(losses, expected, 1e-9), (model, before, plan, after, name, losses, expected)


PRECISIONS = [
    ("zero3", "bf16", 3e-2, 2, 1),
    ("fp16", "zero1", 5e-3, 1, 3),
    ("bf16", "zero3", 3e-2, 1, 2),
    ("bf16 disk", "fp16", 3e-2, 3, 1),
]
AT_OTHER_SIZES = [(*case[:3], 2, 3) for case in PRECISIONS]


@pytest.mark.parametrize(
    ("save", "load", "rtol", "before", "after"), [*PRECISIONS[:2], *full(*PRECISIONS[2:]), *campaign(*AT_OTHER_SIZES)]
)
def test_any_precision_resumes_from_any_other(
    tmp_path: Path, save: str, load: str, rtol: float, before: int, after: int
) -> None:
    """The bounds allow 10 steps of the 16-bit format's rounding errors (2^-9 for bf16, 2^-12 for fp16)."""
    root, how = str(tmp_path), {"dtype": torch.float32, "batches": math.lcm(before, after)}
    expected = _sums(run_ranks(before, save_at, root, "gpt", "adamw", save, how, 10, timeout=120.0))[0]
    found = _sums(run_ranks(after, go_on_at, root, "gpt", "adamw", f"{save} {before}", [load], how, 10))[0]
    assert close_to(found, expected, rtol), (found, expected)
