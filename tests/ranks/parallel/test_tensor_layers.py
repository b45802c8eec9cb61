"""Layers that cannot be cut over an axis are named; sums and gathers of activations take few operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.parallel.tensor import Axis, ShardSpec, TPPlan, vocabulary_cross_entropy
from shardwise.testing import run_ranks
from tests.ranks.engine.test_engine_compile import Kernels
from tests.support.scope import Scope


def refused() -> list[str]:
    with Scope("shared") as group:
        axis = Axis(group)
        tp_plan = TPPlan(axis)
        cuts: list[Any] = [
            lambda: tp_plan.columns(nn.LayerNorm(4), ShardSpec.even(0, 4, 2)),
            lambda: tp_plan.columns(nn.Linear(4, 6), ShardSpec.even(1, 6, 2)),
            lambda: tp_plan.rows(nn.Linear(4, 6), ShardSpec.even(1, 3, 2)),
            lambda: tp_plan.columns(nn.Linear(4, 6), ShardSpec.even(0, 6, 3)),
            lambda: tp_plan.vocabulary(nn.Embedding(8, 4, max_norm=1.0), ShardSpec.even(0, 8, 2)),
            lambda: tp_plan.vocabulary(nn.Embedding(8, 4), ShardSpec.even(0, 6, 2)),
            lambda: vocabulary_cross_entropy(torch.ones(3, 5), torch.ones(3).long(), axis, ShardSpec.even(0, 8, 2), 8),
        ]
        messages = []
        for each in cuts:
            with pytest.raises((TypeError, ValueError)) as error:
                each()
            messages.append(str(error.value))
        shared = nn.Linear(4, 6)
        tp_plan.columns(shared, ShardSpec.even(0, 6, 2))
        with pytest.raises(ValueError, match="is cut as") as error:
            tp_plan.rows(shared, ShardSpec.even(1, 4, 2))
        return [*messages, str(error.value)]


def test_what_cannot_be_cut_is_named() -> None:
    messages = run_ranks(2, refused)[0]
    parts = ["a LayerNorm cannot", "give dim 0 and 6", "give dim 1 and 4", "over an axis of 2", "max_norm=1.0"]
    parts += ["at least as many rows", "give logits [..., 4]", "is cut as"]
    for message, part in zip(messages, parts, strict=True):
        assert part in message, message


def operations() -> dict[str, list[str]]:
    """Of sums, gathers and divided sums over the backend's own collectives."""
    with Scope("native") as group:
        axis, found = Axis(group), {}
        one, two, sizes = torch.ones(1, 2 * group.size, 4), torch.ones(2, 2 * group.size, 4), [2] * group.size
        calls = {
            "sum": lambda: axis.total(one),
            "gather": lambda: axis.joined(one[:, :2], 1, sizes),
            "gather of rows": lambda: axis.joined(two[:, :2], 1, sizes),
            "divided sum": lambda: axis.total_part(one, 1, sizes),
            "divided sum of rows": lambda: axis.total_part(two, 1, sizes),
        }
        for name, call in calls.items():
            with Kernels() as kernels:
                result = call()
            assert result.eq(1 if "gather" in name else group.size).all() and not result._is_view()
            found[name] = kernels.names
        return found


def test_activations_are_exchanged_in_final_memory() -> None:
    gather, scatter = "c10d::_allgather_base_", ["c10d::_reduce_scatter_base_", "copy_"]  # the copy is gloo's
    expected = {"sum": ["clone", "c10d::allreduce_"], "gather": [gather], "gather of rows": ["clone", gather, "cat"]}
    expected |= {"divided sum": scatter, "divided sum of rows": ["stack", *scatter]}
    assert run_ranks(3, operations) == [expected] * 3
