"""Updates during backward give the same bits as updates in ``step()``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from early_setup import (
    CLIPS,
    LOOSE,
    OVERFLOWS,
    Case,
    Seen,
    both,
    check_equal,
    train,
)
from engine_setup import one_mesh
from sets import full

from shardwise.plan import ByNumel, ByTensor, zero
from shardwise.testing import run_ranks
from shardwise.update.early import EarlyObserver, EarlyUpdates

BF16, FP16 = {"param_dtype": torch.bfloat16}, {"param_dtype": torch.float16, "scaler": OVERFLOWS}
CASES = [
    Case(stage=1, optimizer="sgd"),
    Case(stage=2, tiers="host", optimizer="adagrad"),
    Case(stage=3, tiers="mix"),
    Case(stage=1, tiers="mix", changes=CLIPS, optimizer="user", rollbacks=True),
    Case(stage=2, changes=LOOSE, optimizer="user"),
    Case(stage=3, tiers="host", changes=CLIPS, rollbacks=True),
    Case(stage=1, changes=LOOSE, micro=2, rollbacks=True),
    Case(stage=1, changes=LOOSE, micro=2, no_sync=True, optimizer="sgd"),
    Case(stage=1, micro=3, no_sync=True),
    Case(stage=3, changes=LOOSE | {"average": "mean"}, micro=2, optimizer="adagrad", rollbacks=True),
    Case(stage=2, tiers="mix", changes=BF16),
    Case(stage=3, changes=BF16 | CLIPS, model="gpt", rollbacks=True),
    Case(stage=1, changes=FP16, tiers="host", rollbacks=True),
    Case(stage=3, changes=FP16 | CLIPS, tiers="mix", rollbacks=True),
    Case(stage=3, model="unused"),
    Case(stage=2, model="unused", changes=LOOSE),
    Case(stage=3, model="mixture", changes={"packing": ByTensor(persist_numel=0)}),
    Case(stage=2, model="mixture", changes={"packing": ByNumel(chunk_numel=50)}),
    Case(stage=3, model="mixture", changes={"packing": ByNumel(chunk_numel=50)}, optimizer="sgd"),
    Case(stage=2, model="mixture", changes=LOOSE | {"packing": ByNumel(chunk_numel=50)}, rollbacks=None),
    Case(stage=3, model="tied", changes=LOOSE),
    Case(stage=1, model="frozen"),
    Case(stage=3, model="checkpointed_reentrant"),
    Case(stage=3, model="used_twice", changes={"overlap": False}),
    Case(stage=3, optimizer="tensor_lr", changes=LOOSE),
]


@pytest.mark.parametrize("ranks, shared", [(1, None), *full((2, None), (2, False), (4, None))])
def test_equal_to_updates_in_step(ranks: int, shared: bool | None) -> None:
    """Every case alone, and a part of them on several ranks; 16-bit scales need steps until they no longer overflow."""
    cases = {(1, None): CASES, (2, None): CASES[::6], (2, False): CASES[1::6], (4, None): CASES[3::8]}[ranks, shared]
    cases = [replace(case, steps=8 if "scaler" in case.changes else 4) for case in cases]
    check_equal(run_ranks(ranks, both, cases, shared), cases)


@pytest.mark.campaign
@pytest.mark.parametrize("ranks, shared", [(1, None), (2, None), (2, False), (3, None), (4, None), (4, False)])
def test_every_case_on_several_ranks(ranks: int, shared: bool | None) -> None:
    check_equal(run_ranks(ranks, both, CASES, shared, timeout=600.0), CASES)


def replicas() -> list[tuple[Seen, Seen]]:
    case = Case(changes=CLIPS)
    plan = zero(3, dp_replicate=2).but(**CLIPS)
    with one_mesh(plan) as mesh:
        return [(train(case, plan, mesh), train(case, plan.but(update="backward"), mesh))]


def test_hybrid_shards() -> None:
    check_equal(run_ranks(4, replicas), [Case(changes=CLIPS, rollbacks=True)])


# ---- these checks can fail


def broken_rollback() -> list[tuple[Seen, Seen]]:
    """Masters are put back, optimizer state is not."""
    keep = EarlyUpdates._keep

    def forgetful(self: EarlyUpdates, tile: Any) -> Callable[[], None]:
        restore = keep(self, tile)
        states = [self._stepper.optimizer.state.get(piece.value) for piece in tile.pieces]

        def without_state() -> None:
            restore()
            for piece, state in zip(tile.pieces, states, strict=True):
                if state is not None:
                    self._stepper.optimizer.state[piece.value] = state

        return without_state

    with mock.patch.object(EarlyUpdates, "_keep", forgetful):
        return both([Case(changes=CLIPS)], None)


def never_confirmed() -> list[tuple[Seen, Seen]]:
    """Every guess passes for right."""
    with mock.patch.object(EarlyUpdates, "confirm", lambda self, factor: self.settle() is None and bool(self.updated)):
        return both([Case(changes=CLIPS)], None)


def second_results_ignored() -> list[tuple[Seen, Seen]]:
    def ignored(self: EarlyObserver, chunk: int) -> None:
        self._is_first = self._grads[chunk].reduced is None

    with mock.patch.object(EarlyObserver, "before_result", ignored):
        return both([Case(stage=1, changes=LOOSE, micro=2)], None)


@pytest.mark.parametrize("broken", [broken_rollback, never_confirmed, second_results_ignored])
def test_a_broken_roll_back_is_noticed(broken: Callable[[], list[tuple[Seen, Seen]]]) -> None:
    plain, early = run_ranks(1, broken)[0][0]
    assert early.state != plain.state
