"""Random module graphs under random plans, compared with plain training, at 2 ranks in fp64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.plan import ByModule, ByNumel, BySearch, ByTensor, Packing, Plan, zero
from shardwise.testing import run_ranks, train_plain
from tests.parity.sharded import OPTIMIZERS, Run, Setting, Tolerance, check_runs, train_case
from tests.support.models import Batch, ModelCase, mean_square
from tests.support.modules import AroundChildren

WIDTH = 6
LAYERS = ("linear", "no_bias", "mlp", "frozen", "half_frozen", "norm", "around", "stack")
OPERATIONS = ("call", "call_checkpointed", "call_reentrant", "weight", "own", "add", "choose", "detach", "in_place")


@dataclass(frozen=True)
class Operation:
    """``kind`` applied to value ``source`` with ``layer`` (indices modulo the available number).

    ``other`` is a second value or layer.
    """

    kind: str
    source: int
    layer: int
    other: int


@dataclass(frozen=True)
class Graph:
    """``listed``: layers are in a ModuleList (separate units under ByModule), or are attributes."""

    layers: tuple[str, ...]
    operations: tuple[Operation, ...]
    listed: bool
    outputs: int
    loss_reads_all: bool

    @property
    def ranks_differ(self) -> bool:
        """Whether the batch decides which layers run."""
        return any(operation.kind == "choose" for operation in self.operations)


def _layer(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
    if kind == "stack":
        return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), AroundChildren())
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    if kind == "around":
        return AroundChildren()
    linear = nn.Linear(WIDTH, WIDTH, bias=kind != "no_bias")
    linear.weight.requires_grad_(kind not in ("frozen", "half_frozen"))
    if kind == "frozen":
        linear.bias.requires_grad_(False)
    return linear


class GraphModule(nn.Module):
    """Runs a :class:`Graph`; a trainable layer comes last, so that there is always something to train."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        layers = [_layer(kind) for kind in graph.layers]
        if graph.listed:
            self.layers = nn.ModuleList(layers)
        else:
            for index, layer in enumerate(layers):
                self.add_module(f"layer{index}", layer)
        self.own = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def _layer(self, index: int) -> nn.Module:
        count = len(self.graph.layers)
        name = f"{index % count}"
        return self.get_submodule(f"layers.{name}" if self.graph.listed else f"layer{name}")

    def forward(self, x: Tensor, y: Tensor, choice: int) -> tuple[Tensor, ...]:
        values = [x, y]
        for operation in self.graph.operations:
            result = self._apply_one(operation, values, choice)
            # Bounded, and never the same tensor as an earlier value.
            values.append(torch.tanh(result))
        return tuple(self.head(value) for value in values[-self.graph.outputs :])

    def _apply_one(self, operation: Operation, values: list[Tensor], choice: int) -> Tensor:
        source = values[operation.source % len(values)]
        other = values[operation.other % len(values)]
        layer = self._layer(operation.layer)
        kind = operation.kind
        if kind == "call_checkpointed":
            return checkpoint(layer, source, use_reentrant=False)
        if kind == "call_reentrant" and source.requires_grad:
            return checkpoint(layer, source, use_reentrant=True)
        if kind == "weight":  # without calling the layer that has it
            path = next(name for name, p in layer.named_parameters() if p.dim() > 0).split(".")
            # By attribute, as models do; iterating over parameters() gathers nothing.
            weight: Tensor = getattr(layer.get_submodule(".".join(path[:-1])), path[-1])
            return functional.linear(source, weight) if weight.shape == (WIDTH, WIDTH) else source * weight.sum()
        if kind == "own":
            return source * self.own
        if kind == "add":
            return source + other
        if kind == "choose":
            return self._layer(operation.layer + choice % 2)(source)
        if kind == "detach":
            return source.detach() + other
        result = layer(source)
        return result.mul_(0.5) if kind == "in_place" else result


def _inputs(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    x, y, target = (torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    return {"args": (x, y, int(torch.randint(4, (), generator=generator))), "target": target}


def _loss(reads_all: bool, model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(*batch["args"])
    return torch.stack([mean_square(o, batch["target"]) for o in (outputs if reads_all else outputs[:1])]).sum()


def _case(graph: Graph) -> ModelCase:
    loss = partial(_loss, graph.loss_reads_all)
    return ModelCase("graph", lambda dtype: GraphModule(graph), _inputs, loss, "a random graph")


def train_graph(graph: Graph, setting: Setting) -> Run:
    """Train a graph on a rank of a pool."""
    return train_case(_case(graph), setting)


# Deeper than the matrix's models, so rounding errors grow more.
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


def _check(graph: Graph, setting: Setting) -> None:
    note(f"{graph}\n{setting}")
    runs: list[Run] = run_ranks(2, train_graph, graph, setting)
    case, make = _case(graph), OPTIMIZERS[setting.optimizer]
    batches = setting.batches(case)
    expected = train_plain(lambda: case.factory(setting.dtype), case.loss, make, batches, setting.recipe)
    check_runs(runs, expected, setting, TOLERANCE)


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
def test_random_graph_under_a_random_plan_trains_as_plain(case: tuple[Graph, Setting]) -> None:
    _check(*case)


@pytest.mark.full
@_limits(25)
@given(case=cases())
def test_more_random_graphs(case: tuple[Graph, Setting]) -> None:
    _check(*case)


@pytest.mark.campaign
@_limits(5000)
@given(case=cases())
def test_many_random_graphs(case: tuple[Graph, Setting]) -> None:
    _check(*case)
