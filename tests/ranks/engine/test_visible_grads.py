"""``.grad`` of sharded parameters, read, clipped, edited and assigned as in plain PyTorch, against plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from shardwise.core.grads.sharded_grad import ShardedGrad
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, SCALER, check, data, one_mesh, seeded, sharded
from tests.support.sets import full

STEPS, MICRO = 2, 2
ROWS = {"zero2_host": zero(2).but(state_host_fraction=1.0)}
ROWS |= {name: PLANS[name] for name in ("ddp", "zero1", "zero3")}
ROWS["zero3_gloo"] = PLANS["zero3_gloo"].but(same_order=False)  # a module runs on the first rank alone
ROWS |= {"zero2_mean": zero(2).but(average="mean"), "zero3_tokens": zero(3).but(average="tokens")}
ROWS |= {"zero2_scaled": zero(2).but(scaler=SCALER), "zero1_scaled_mean": zero(1).but(scaler=SCALER, average="mean")}
QUICK = ("zero3", "zero2_mean", "zero2_scaled")


class Odd(nn.Module):
    """A tied weight, a frozen layer, one that nobody uses, one that the first rank alone uses, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 6)
        self.sometimes = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embedding.weight
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        hidden = self.second(self.frozen(torch.tanh(self.first(x))))
        if rank == 0:
            hidden = hidden + self.sometimes(hidden)
        return self.head(hidden) * self.scalar + self.embedding(torch.tensor([1, 3])).sum()


Reads = list[float]
Edit = Callable[[Odd, int], Reads]
"""Called after each backward pass of a step, with its number."""


def last(edit: Callable[[Odd], Reads]) -> Edit:
    return lambda model, micro: edit(model) if micro == MICRO - 1 else []


def value_of(foreach: bool | None) -> Edit:
    def edit(model: Odd) -> Reads:
        clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
        return [float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))]

    return last(edit)


def norm_of(p: float, foreach: bool | None) -> Edit:
    def edit(model: Odd) -> Reads:
        return [float(clip_grad_norm_(model.parameters(), 0.05, p, error_if_nonfinite=True, foreach=foreach))]

    return last(edit)


def in_two(model: Odd) -> Reads:
    """Of some parameters only, and not the norm of these."""
    norm = get_total_norm([p.grad for p in model.first.parameters() if p.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.01, norm * 2)
    return [float(norm), float(clip_grad_norm_([model.scalar], 1e-3)), float(clip_grad_norm_(model.scalar, 1e9))]


def grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def read(model: Odd) -> Reads:
    found: Reads = []
    for name, p in model.named_parameters():
        if p.grad is None:
            found.append(-1.0)
            continue
        assert p.grad.shape == p.shape and p.grad.dtype == p.dtype and p.grad.device == p.device, name
        for each in (p.grad.norm(), p.grad.data.norm(1), p.grad.detach().flatten().norm(math.inf), p.grad.norm(3)):
            found.append(float(each))
        found += [float(p.grad.abs().max()), float(p.grad.mean()), float(p.grad.norm(0)), float(p.grad.float().sum())]
        found += [float(p.grad.clone().flatten()[-1]), float((p.grad * 2 + 1).sum())]
        found += [float(torch.zeros_like(p.grad).sum()), float(torch.ones_like(p).copy_(p.grad).sum())]
    found += [float(torch.stack([grad(p).abs().amax() for p in model.first.parameters()]).sum())]
    weight = grad(model.first.weight)
    found += [*weight.norm(dim=1).tolist(), *weight[1].tolist(), float(weight.t()[2, 3]), weight[0, 0].item()]
    found += [float(torch.cat([grad(p).reshape(-1) for p in model.second.parameters()]).norm())]
    return found


def edit_in_place(model: Odd) -> Reads:
    weight = grad(model.first.weight)
    weight.mul_(0.5).div_(torch.tensor(3.0)).neg_()
    weight *= (torch.arange(48.0).view(8, 6) % 3 > 0).double()
    weight[2:4] = 0.0
    weight.view(-1)[5] = 7.0
    weight.data[6, torch.tensor([True, False, True, False, False, True])] = 0.25
    grad(model.first.bias).add_(0.1).add_(torch.arange(8.0) / 50, alpha=2).clamp_(min=-0.2).clamp_max_(0.3)
    grad(model.second.bias).sub_(torch.ones(6), alpha=0.5).sign_()
    grad(model.second.weight).t()[1].fill_(-0.5)
    grad(model.second.weight).nan_to_num_(0.0).add_(grad(model.sometimes.weight).abs()[:, :1])
    grad(model.embedding.weight)[torch.tensor([1, 3])] += 0.75
    grad(model.scalar).copy_(torch.tensor(0.375, dtype=torch.float64))
    first, *_ = grad(model.head.bias).split(3)
    first.zero_()
    torch._foreach_mul_([grad(p) for p in model.sometimes.parameters()], [0.5, 3.0])
    return read(model)


def assign(model: Odd) -> Reads:
    model.first.bias.grad = torch.arange(8.0, dtype=torch.float64) / 8
    model.first.weight.grad = grad(model.first.weight) * 3
    model.second.weight.grad = grad(model.second.weight).detach()  # the same again
    model.second.bias.grad = None
    model.unused.bias.grad = torch.full((3,), 0.5, dtype=torch.float64)
    norm = clip_grad_norm_(model.parameters(), 0.5)
    return [float(norm), *(float(grad(p).norm()) for p in (model.first.bias, model.unused.bias))]


def clear_all(model: Odd, micro: int) -> Reads:
    """The gradients of the first pass are dropped as many scripts do it, and those of a module of the second."""
    if micro:
        model.second.zero_grad(set_to_none=False)
        model.sometimes.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None
    return []


def every_pass(model: Odd, micro: int) -> Reads:
    """What is edited between passes is what the next one is added to."""
    norm = clip_grad_norm_(model.parameters(), 0.1)
    if not micro:
        model.first.bias.grad = torch.ones(8, dtype=torch.float64)
        model.second.bias.grad = None
    return [float(norm)]


EDITS: dict[str, Edit] = {
    **{f"norm {p} {foreach}": norm_of(p, foreach) for p, foreach in ((2.0, None), (math.inf, True))},
    "value": value_of(None),
    "in two": last(in_two),
    "read": last(read),
    "edit": last(edit_in_place),
    "assign": last(assign),
    "clear": clear_all,
    "every pass": every_pass,
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05, eps=1e-2)


def losses(model: Any, rank: int, step: int) -> Iterator[Tensor]:
    for micro in range(MICRO):
        yield model(data(rank, step, micro), rank).square().mean() * 10


def edits_under(plan: Plan) -> dict[str, Edit]:
    """Where passes are averaged, what a pass before the last one leaves has no like in plain torch."""
    left_out = () if plan.grad.average == "sum" else ("clear", "every pass")
    return {name: edit for name, edit in EDITS.items() if name not in left_out}


def plain(edit: Edit, ranks: int, divisor: float = 1.0) -> tuple[dict[str, Tensor], Reads]:
    model = seeded(Odd)
    optimizer, reads = optimizer_of(model), []
    for step in range(STEPS):
        for micro, several in enumerate(zip(*(losses(model, rank, step) for rank in range(ranks)), strict=True)):
            for loss in several:
                (loss / (ranks * divisor)).backward()
            reads += edit(model, micro)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), reads


def ours(edit: Edit, plan: Plan, mesh: Mesh, zeroed: bool) -> tuple[dict[str, Tensor], Reads]:
    model, reads = seeded(Odd), []
    with sharded(model, optimizer_of(model), plan, mesh) as session:
        for step in range(STEPS):
            for micro, loss in enumerate(losses(session.module, mesh.rank, step)):
                if plan.grad.average == "tokens":
                    session.backward(loss, tokens=7)
                elif step % 2 or plan.precision.scaler is not None:
                    session.backward(loss)
                else:
                    loss.backward()
                reads += edit(model, micro)
            session.optimizer.step()
            if zeroed:
                session.optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
        return session.module.state_dict(), reads


def all_edits(plan: Plan) -> list[tuple[dict[str, Tensor], Reads]]:
    with one_mesh(plan) as mesh:
        return [ours(edit, plan, mesh, at % 2 == 0) for at, edit in enumerate(edits_under(plan).values())]


def compare(name: str, plan: Plan, ranks: int) -> None:
    results = run_ranks(ranks, all_edits, plan)
    for at, (what, edit) in enumerate(edits_under(plan).items()):
        state, reads = plain(edit, ranks, 1.0 if plan.grad.average == "sum" else MICRO)
        for rank, (_, found) in enumerate(each[at] for each in results):
            assert found == pytest.approx(reads, rel=1e-6, abs=1e-12), f"{what}, {name}, rank {rank}"
        check([each[at][0] for each in results], state, f"{what}, {name}", rtol=1e-9)


@pytest.mark.parametrize("name", [*QUICK, *full(*[name for name in ROWS if name not in QUICK])])
def test_gradients_are_read_and_changed_as_in_plain_torch(name: str) -> None:
    compare(name, ROWS[name], 2)


@pytest.mark.full
def test_gradients_of_replicas() -> None:
    compare("hybrid", PLANS["hybrid"], 4)


def test_the_edits_change_what_is_trained() -> None:
    """Otherwise the comparison above could not fail."""
    untouched, _ = plain(lambda model, micro: [], 2)
    for what, edit in EDITS.items():
        state, reads = plain(edit, 2)
        assert what == "read" or any(not torch.equal(state[key], untouched[key]) for key in state), what
        assert reads or what == "clear"
    assert not isinstance(seeded(Odd).scalar.grad, ShardedGrad)
