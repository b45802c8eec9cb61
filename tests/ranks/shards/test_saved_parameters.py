"""Whatever autograd saves, and whoever packs it: gradients are those of plain PyTorch where parameters are evicted."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from saving_setup import OPS, ROWS, WAYS, Table, ops_of, plainly
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import ByTensor, Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import data, one_mesh, seeded, sharded, told
from tests.support.sets import full

# A unit a module, and one a parameter; nothing that is idle stays gathered.
SHARED, ALONE = zero(3), zero(3).but(packing=ByTensor(persist_numel=0))
GLOO = zero(3).but(shared_memory=False)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@functools.cache
def expected(way: str, names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    table = seeded(lambda: Table(list(names)))
    optimizer = plain_sgd(table)
    inputs = []
    for rank in range(2):
        x = data(rank, 0, rows=ROWS).requires_grad_()
        (WAYS[way](table, table, x) / 2).backward()
        inputs.append(2 * x.grad)
    optimizer.step()
    return [{"x": grad} | dict(table.named_parameters()) for grad in inputs]


def trained(plan: Plan, way: str, names: list[str], mesh: Mesh) -> dict[str, Tensor]:
    """The parameters after one step, and the gradient of the input."""
    table = seeded(lambda: Table(names))
    with sharded(table, plain_sgd(table), plan, mesh) as session:
        x = data(mesh.rank, 0, rows=ROWS).requires_grad_()
        session.backward(WAYS[way](table, session.module, x))
        session.optimizer.step()
        state = session.module.state_dict()
        return {"x": x.grad} | {name: state[name] for name, _ in table.named_parameters()}


Found = dict[tuple[str, tuple[str, ...]], dict[str, Tensor]]


def on_rank(plan: Plan, ways: list[str], some: set[str]) -> Found:
    with one_mesh(plan) as mesh:
        found: Found = {}
        for way in ways:
            names = [name for name in ops_of(way) if name in some]
            found[way, tuple(names)] = trained(plan, way, names, mesh)
        return found


def compare(plan: Plan, ways: list[str], some: Iterable[str] = OPS) -> None:
    """Compare a table of some operators in all ``ways`` with plain PyTorch."""
    results = run_ranks(2, on_rank, plan, ways, set(some), timeout=300)
    for way, names in results[0]:
        for rank, wanted in enumerate(expected(way, names)):
            assert_close(results[rank][way, names], wanted, 1e-10, f"{way} {names[:3]}, rank {rank}")


FEW = {"layer_norm", "attention", "lstm", "mul", "function_keeps"}


@pytest.mark.full
@pytest.mark.parametrize("ways", [list(WAYS)[::2], list(WAYS)[1::2]], ids=["even", "odd"])
def test_every_operator_that_saves_parameters(ways: list[str]) -> None:
    compare(SHARED, ways)


@pytest.mark.parametrize("plan", [SHARED, *full(GLOO)], ids=["shared", "gloo"])
def test_some(plan: Plan) -> None:
    compare(plan, list(WAYS), some=FEW)


def stale(plan: Plan) -> dict[str, str]:
    """What the backward pass of a graph from before an update says."""
    found = {}
    with one_mesh(plan) as mesh:
        for way in ("plainly", "without_hooks", "under_identity", "graph_inside", "mapped", "penalty"):
            table = seeded(lambda: Table(["layer_norm", "mul", "linear"]))
            with sharded(table, plain_sgd(table), plan, mesh) as session:
                late = WAYS[way](table, session.module, data(0, 0, rows=ROWS).requires_grad_())
                session.backward(plainly(table, session.module, data(0, 1, rows=ROWS)))
                session.optimizer.step()
                found[way] = told(late.backward)
    return found


@pytest.mark.parametrize("plan", [SHARED, *full(GLOO)], ids=["shared", "gloo"])
def test_graphs_from_before_an_update_are_refused(plan: Plan) -> None:
    for found in run_ranks(2, stale, plan):
        for way, message in found.items():
            assert "inplace operation" in message or "since the forward pass" in message, way
