"""``torch.func``, forward-mode differentiation and recomputations through models whose parameters are evicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardwise.core.mesh import Mesh
from shardwise.plan import ByTensor, Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import check, data, one_mesh, run_plain, run_sharded, seeded, sgd, sharded, told
from tests.support.sets import campaign, full


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
PLANS = {
    "shared": zero(3),
    "gloo": zero(3).but(shared_memory=False),
    "alone": zero(3).but(packing=ByTensor(persist_numel=0)),
}


def numbers(result: Any) -> dict[str, Tensor]:
    return {str(i): leaf.detach().clone() for i, leaf in enumerate(tree_leaves(result))}


def transformed(plan: Plan, mesh: Mesh) -> dict[str, dict[str, Tensor]]:
    found = {}
    model = seeded(Net)
    with sharded(model, sgd(model), plan, mesh) as session:
        for name, use in USES.items():
            found[name] = numbers(use(model, data(0, 0)))
            session.backward(square(session.module)(data(mesh.rank, 1)))  # it trains as before
        session.optimizer.step()
        found["trained"] = session.module.state_dict()
    return found


def on_rank(plan: Plan) -> dict[str, dict[str, Tensor]]:
    with one_mesh(plan) as mesh:
        return transformed(plan, mesh)


@pytest.mark.parametrize("name", ["alone", *full("gloo"), *campaign("shared")])
def test_transforms_of_the_whole_model(name: str) -> None:
    model = seeded(Net)
    optimizer = sgd(model)
    expected = {use: numbers(USES[use](model, data(0, 0))) for use in USES}
    for rank in range(2):
        (len(USES) * square(model)(data(rank, 1)) / 2).backward()
    optimizer.step()
    expected["trained"] = dict(model.state_dict())
    for rank, found in enumerate(run_ranks(2, on_rank, PLANS[name], timeout=120)):
        for use, wanted in expected.items():
            assert_close(found[use], wanted, 1e-10, f"{name}, {use}, rank {rank}")


class Within(Net):
    def forward(self, x: Tensor) -> Tensor:
        return grad(lambda x: Net.forward(self, x).square().mean())(x)


def within(plan: Plan) -> str:
    model = seeded(Within)
    with sharded(model, sgd(model), plan) as session:
        return told(lambda: session.module(data(0, 0)))


def test_transforms_inside_a_forward_pass_are_refused() -> None:
    for message in run_ranks(2, within, PLANS["shared"]):
        assert "inside the forward pass of a Within" in message
        assert "stage 2" in message


# ---- reads in backward


class Recomputed(nn.Module):
    """Its recomputation reads parameters that no module's forward gathers for it."""

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


def read_in_backward(plan: Plan) -> dict[str, dict[str, Tensor]]:
    with one_mesh(plan) as mesh:
        return {name: run_sharded(READERS[name], reading, plan, 2, mesh) for name in READERS}


@pytest.mark.parametrize("name", ["shared", *full("gloo", "alone")])
def test_parameters_read_in_backward(name: str) -> None:
    results = run_ranks(2, read_in_backward, PLANS[name])
    for reader, build in READERS.items():
        check([result[reader] for result in results], run_plain(build, reading, 2, 2), f"{name}, {reader}", rtol=1e-9)
