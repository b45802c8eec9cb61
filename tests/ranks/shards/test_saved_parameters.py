"""Parameters that autograd saves for backward, and saved tensor hooks, where parameters are evicted between passes.

Gradients equal plain PyTorch's; saved values that were changed since are an error. ``torch.func`` and recomputation
work through sharded models.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from saving_setup import OPS, ROWS, WAYS, Table, ops_of, plainly
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardwise.core.mesh import Mesh
from shardwise.plan import ByTensor, Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import (
    PLANS,
    check,
    data,
    loss_of,
    one_mesh,
    plain_steps,
    run_plain,
    run_sharded,
    seeded,
    sgd,
    sharded,
)
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full

# A unit per module, and one per parameter; idle units are freed.
PLANS_OF_3 = {
    "shared": zero(3),
    "gloo": zero(3).but(shared_memory=False),
    "alone": zero(3).but(packing=ByTensor(persist_numel=0)),
}
SHARED = PLANS_OF_3["shared"]


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
    """Return the parameters after one step, and the gradient of the input."""
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


@pytest.mark.parametrize("name", ["shared", *full("gloo")])
def test_some_operators_that_save_parameters(name: str) -> None:
    compare(PLANS_OF_3[name], list(WAYS), some=FEW)


@pytest.mark.parametrize("name", ["shared", *full("gloo")])
@on_ranks(2)
def test_graphs_from_before_an_update_are_refused(name: str) -> None:
    plan = PLANS_OF_3[name]
    with one_mesh(plan) as mesh:
        for way in ("plainly", "without_hooks", "under_identity", "graph_inside", "mapped", "penalty"):
            table = seeded(lambda: Table(["layer_norm", "mul", "linear"]))
            with sharded(table, plain_sgd(table), plan, mesh) as session:
                late = WAYS[way](table, session.module, data(0, 0, rows=ROWS).requires_grad_())
                session.backward(plainly(table, session.module, data(0, 1, rows=ROWS)))
                session.optimizer.step()
                raises(RuntimeError, "inplace operation|since the forward pass", late.backward)


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


class Overwriting(nn.Module):
    """Changes in place what ``exp`` has saved for backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return y.add_(1.0)


@pytest.mark.parametrize("name", ["zero2", "zero3", *full("zero3_gloo")])
@on_ranks(2)
def test_changed_saved_values_are_an_error(name: str) -> None:
    """They are one in plain torch, too, whose own check does not see values that hooks have packed."""
    model = seeded(lambda: nn.Sequential(net(), Overwriting(), net()))
    with sharded(model, sgd(model), PLANS[name]) as session:
        raises(RuntimeError, "modified by an inplace operation", session.backward, loss_of(session))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(3)])
        self.attention = nn.MultiheadAttention(6, 2)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(x)
        return self.last(y + self.attention(y, y, y)[0])


Use = Callable[[Net, Tensor], Any]


def square(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def dual(model: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent.detach().clone()


def other_values(model: Net, x: Tensor) -> Tensor:
    given = {name: torch.full(p.shape, 0.1, dtype=x.dtype) for name, p in model.named_parameters()}
    return functional_call(model, given, (x,))


USES: dict[str, Use] = {
    "grad": lambda m, x: grad(square(m))(x),
    "jvp": lambda m, x: jvp(m, (x,), (x.cos(),)),
    "hessian": lambda m, x: hessian(square(m))(x),
    "vmap": lambda m, x: vmap(m)(torch.stack([x, x.cos()])),
    "dual": dual,
    "functional_call": lambda m, x: functional_call(m, dict(m.named_parameters()), (x,)),
    "other_values": other_values,
}


def numbers(result: Any) -> dict[str, Tensor]:
    return {str(i): leaf.detach().clone() for i, leaf in enumerate(tree_leaves(result))}


@pytest.mark.parametrize("name", ["alone", *full("gloo"), *campaign("shared")])
@on_ranks(2, timeout=120.0)
def test_transforms_of_the_whole_model(name: str) -> None:
    model, plain = seeded(Net), seeded(Net)
    with sharded(model, sgd(model), PLANS_OF_3[name]) as session:
        for what, use in USES.items():
            expected = numbers(use(plain, data(0, 0)))
            assert_close(numbers(use(model, data(0, 0))), expected, 1e-10, f"{name}, {what}")
            session.backward(square(session.module)(data(session.mesh.rank, 1)))  # training works as before
        session.optimizer.step()
        trained = plain_steps(plain, sgd(plain), 1, lambda m, rank, _: len(USES) * square(m)(data(rank, 1)))
        assert_close(session.module.state_dict(), trained, 1e-10, f"{name}, trained")


class Within(Net):
    def forward(self, x: Tensor) -> Tensor:
        return grad(lambda x: Net.forward(self, x).square().mean())(x)


@on_ranks(2)
def test_transforms_inside_a_forward_pass_are_refused() -> None:
    model = seeded(Within)
    with sharded(model, sgd(model), SHARED) as session:
        raises(RuntimeError, "inside the forward pass of a Within.*stage 2", session.module, data(0, 0))


# ---- reads in backward


class Recomputed(nn.Module):
    """Its recomputation reads parameters that no module's forward gathers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.weight, self.scale = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.rand(6))

    def part(self, x: Tensor) -> Tensor:
        weight = self.weight
        y = F.layer_norm(self.inner(torch.tanh(x @ weight)), (6,), self.scale)
        return self.outer(y) @ weight @ self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, torch.tanh(self.inner(x)), use_reentrant=self.reentrant)


class ReadByAHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda gradient: gradient * self.second.weight.detach().sum())
        return self.last(self.second(y))


READERS: dict[str, Callable[[], nn.Module]] = {
    "reentrant": lambda: Recomputed(True),
    "not_reentrant": lambda: Recomputed(False),
    "hook": ReadByAHook,
}


def reading(model: nn.Module, rank: int, step: int) -> Any:
    yield model(data(rank, step).requires_grad_()).square().mean(), False


@pytest.mark.parametrize("name", ["shared", *full("gloo", "alone")])
@on_ranks(2)
def test_parameters_read_in_backward(name: str) -> None:
    for reader, build in READERS.items():
        found = run_sharded(build, reading, PLANS_OF_3[name], 2)
        check([found], run_plain(build, reading, 2, 2), f"{name}, {reader}", rtol=1e-9)
