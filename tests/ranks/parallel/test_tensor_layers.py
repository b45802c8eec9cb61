"""Layers that cannot be cut over an axis are named; sums and gathers of activations take few operations."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.core.parallel.tensor import Axis, ShardSpec, TPPlan, vocabulary_cross_entropy
from tests.ranks.engine.test_engine_compile import Kernels
from tests.support.on_ranks import assert_refused, on_ranks
from tests.support.scope import Scope


@on_ranks(2)
def test_what_cannot_be_cut_is_named() -> None:
    with Scope("shared") as group:
        axis = Axis(group)
        tp_plan, spec = TPPlan(axis), ShardSpec.even
        shared = nn.Linear(4, 6)
        tp_plan.columns(shared, spec(0, 6, 2))
        scores = torch.ones(3, 5), torch.ones(3).long(), axis, spec(0, 8, 2), 8
        assert_refused(
            (lambda: tp_plan.columns(nn.LayerNorm(4), spec(0, 4, 2)), "a LayerNorm cannot"),
            (lambda: tp_plan.columns(nn.Linear(4, 6), spec(1, 6, 2)), "give dim 0 and 6"),
            (lambda: tp_plan.rows(nn.Linear(4, 6), spec(1, 3, 2)), "give dim 1 and 4"),
            (lambda: tp_plan.columns(nn.Linear(4, 6), spec(0, 6, 3)), "over an axis of 2"),
            (lambda: tp_plan.vocabulary(nn.Embedding(8, 4, max_norm=1.0), spec(0, 8, 2)), "max_norm=1.0"),
            (lambda: tp_plan.vocabulary(nn.Embedding(8, 4), spec(0, 6, 2)), "at least as many rows"),
            (lambda: vocabulary_cross_entropy(*scores), "give logits [..., 4]"),
            (lambda: tp_plan.rows(shared, spec(1, 4, 2)), "is cut as"),
            error=(TypeError, ValueError),
        )


GATHER, SCATTER = "c10d::_allgather_base_", ["c10d::_reduce_scatter_base_", "copy_"]  # the copy is gloo's


@on_ranks(3)
def test_activations_are_exchanged_in_final_memory() -> None:
    """By sums, gathers and divided sums over the backend's own collectives."""
    with Scope("native") as group:
        axis = Axis(group)
        one, two, sizes = torch.ones(1, 6, 4), torch.ones(2, 6, 4), [2] * 3
        for call, value, names in (
            (lambda: axis.total(one), 3, ["clone", "c10d::allreduce_"]),
            (lambda: axis.joined(one[:, :2], 1, sizes), 1, [GATHER]),
            (lambda: axis.joined(two[:, :2], 1, sizes), 1, ["clone", GATHER, "cat"]),
            (lambda: axis.total_part(one, 1, sizes), 3, SCATTER),
            (lambda: axis.total_part(two, 1, sizes), 3, ["stack", *SCATTER]),
        ):
            with Kernels() as kernels:
                result = call()
            assert result.eq(value).all() and not result._is_view()
            assert kernels.names == names
