"""Random module graphs under random plans, against plain training, at 2 ranks in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from shardwise.plan import ByModule, ByNumel, BySearch, ByTensor, Packing, Plan, zero
from shardwise.testing import run_ranks
from tests.parity.graphs import LAYERS, OPERATIONS, Graph, Operation, plain_graph, train_graph
from tests.parity.sharded import Run, Setting, Tolerance, check_runs

# Deeper than the matrix's models, so rounding has further to go.
TOLERANCE = Tolerance(rtol=1e-11, floor=1e-6)

_small = st.integers(0, 7)
_operations = st.builds(Operation, kind=st.sampled_from(OPERATIONS), source=_small, layer=_small, other=_small)
graphs = st.builds(
    Graph,
    layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=5).map(tuple),
    operations=st.lists(_operations, min_size=1, max_size=8).map(tuple),
    listed=st.booleans(),
    outputs=st.integers(1, 3),
    loss_reads_all=st.booleans(),
)
packings: st.SearchStrategy[Packing] = st.one_of(
    st.builds(ByNumel, chunk_numel=st.integers(1, 150)),
    st.builds(ByTensor, persist_numel=st.integers(0, 40)),
    st.just(ByModule(unit_classes=())),
    st.builds(
        BySearch,
        search_range_numel=st.integers(0, 64),
        interval_numel=st.integers(1, 16),
        min_chunk_numel=st.integers(1, 64),
    ),
)


@st.composite
def plans(draw: st.DrawFn, ranks_differ: bool) -> Plan:
    changes: dict[str, Any] = {
        "packing": draw(packings),
        "dp_shard": draw(st.sampled_from([2, 2, 2, 1])),
        "dp_replicate": -1,
        "gathered_fraction": draw(st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0])),
        "gathered_budget_bytes": draw(st.none() | st.integers(0, 5000)),
        "prefetch": draw(st.integers(0, 3)),
        "reduce": draw(st.sampled_from(["every", "last"])),
        "overlap": draw(st.booleans()),
        "shared_memory": draw(st.sampled_from([None, False])),
        "same_order": False if ranks_differ else draw(st.sampled_from([None, False])),
        "gather_on_use": draw(st.booleans()),
        "max_norm": draw(st.sampled_from([0.0, 0.02])),
        "norm_type": draw(st.sampled_from([1.0, 2.0, 3.0, math.inf])),
        "average": draw(st.sampled_from(["sum", "mean", "tokens"])),
    }
    return zero(3).but(**changes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, Setting]:
    graph = draw(graphs)
    plan = draw(plans(graph.ranks_differ))
    setting = Setting(
        model="graph",
        plan=plan,
        world_size=2,
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        micro_batches=draw(st.integers(1, 2)),
        steps=2,
        dtype=torch.float64,
        use_no_sync=plan.shard.reduce == "last" and draw(st.booleans()),
    )
    return graph, setting


def _check(case: tuple[Graph, Setting]) -> None:
    graph, setting = case
    note(f"{graph}\n{setting}")
    runs: list[Run] = run_ranks(2, train_graph, graph, setting)
    check_runs(runs, plain_graph(graph, setting), setting, TOLERANCE)


def _limits(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )


@_limits(8)
@given(case=cases())
def test_a_random_graph_under_a_random_plan_trains_as_plain(case: tuple[Graph, Setting]) -> None:
    _check(case)


@pytest.mark.full
@_limits(25)
@given(case=cases())
def test_more_random_graphs(case: tuple[Graph, Setting]) -> None:
    _check(case)


@pytest.mark.campaign
@_limits(5000)
@given(case=cases())
def test_many_random_graphs(case: tuple[Graph, Setting]) -> None:
    _check(case)
