"""Random module graphs as plain data, so that ranks can build the same ones.

A graph is a list of operations on values of shape ``[rows, 6]``; the first two values are the inputs. What nobody
reads is an unused branch, what is read twice makes parallel ones, and a layer that occurs in several operations is
shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.testing import PlainRun, train_plain
from tests.parity.sharded import OPTIMIZERS, Run, Setting, train_case
from tests.support.models import Batch, ModelCase, mean_square

WIDTH = 6
LAYERS = ("linear", "no_bias", "mlp", "frozen", "half_frozen", "norm", "around", "stack")
OPERATIONS = ("call", "call_checkpointed", "call_reentrant", "weight", "own", "add", "choose", "detach", "in_place")


@dataclass(frozen=True)
class Operation:
    """``kind`` applied to value ``source`` with ``layer`` (an index modulo what there is); ``other`` is a second value
    or layer."""

    kind: str
    source: int
    layer: int
    other: int


@dataclass(frozen=True)
class Graph:
    """``listed``: layers lie in a ModuleList (units of their own under ByModule) or are attributes."""

    layers: tuple[str, ...]
    operations: tuple[Operation, ...]
    listed: bool
    outputs: int
    loss_reads_all: bool

    @property
    def ranks_differ(self) -> bool:
        """Whether the batch decides which layers run."""
        return any(operation.kind == "choose" for operation in self.operations)


class _Around(nn.Module):
    """Own parameters before and after a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) * self.scale + x @ self.weight


def _layer(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
    if kind == "stack":
        return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), _Around())
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    if kind == "around":
        return _Around()
    linear = nn.Linear(WIDTH, WIDTH, bias=kind != "no_bias")
    linear.weight.requires_grad_(kind not in ("frozen", "half_frozen"))
    if kind == "frozen":
        linear.bias.requires_grad_(False)
    return linear


class GraphModule(nn.Module):
    """Runs a :class:`Graph`; a trained layer comes last, so that there is always something to train."""

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
    return ModelCase("graph", lambda dtype: GraphModule(graph), _inputs, loss, False, "a random graph")


def train_graph(graph: Graph, setting: Setting) -> Run:
    """Runs on every rank of a pool."""
    return train_case(_case(graph), setting)


def plain_graph(graph: Graph, setting: Setting) -> PlainRun:
    """The oracle."""
    case = _case(graph)
    return train_plain(
        lambda: case.factory(setting.dtype),
        case.loss,
        OPTIMIZERS[setting.optimizer],
        setting.batches(case),
        setting.recipe,
    )
