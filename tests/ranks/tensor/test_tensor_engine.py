"""Engines over a model whose layers are cut, against plain PyTorch in one process: fp64, every plan, dp x tp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_setup import PLANS, adam, sharded
from tensor_setup import VOCABULARY, Model, Parts, made
from torch import Tensor
from torch.nn import functional

from shardwise.chunk.layout import ParamFact
from shardwise.plan import Plan, TensorPlan
from shardwise.testing import assert_close, run_ranks

STEPS, LR, MAX_NORM = 3, 0.02, 0.5


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids, labels = torch.randint(0, VOCABULARY, (2, 3, 7), generator=generator)
    return ids, labels


def loss_of(model: torch.nn.Module, rank: int, step: int) -> Tensor:
    ids, labels = batch_of(rank, step)
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def plain(tied: bool, replicas: int) -> Iterator[tuple[float, float, dict[str, Tensor]]]:
    """By step: the mean loss, the norm before clipping, and the parameters."""
    model = made(tied)
    optimizer = adam(model, LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, rank, step) / replicas for rank in range(replicas)]
        for loss in losses:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        yield sum(loss.item() for loss in losses), norm.item(), values


def wide(numbers: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def part_of(fact: ParamFact, value: Tensor) -> Tensor:
    return value if fact.part is None else fact.part.of(value)


def trained(plan: Plan, tied: bool) -> None:
    model: Model = made(tied)
    with sharded(model, adam(model, LR), plan) as session:
        mesh, optimizer = session.mesh, session.optimizer
        assert optimizer is not None and mesh.tensor.size == plan.mesh.tp
        facts = session.engine.layout.facts
        for step, (loss, norm, values) in enumerate(plain(tied, mesh.size)):
            own = loss_of(session.module, mesh.rank, step)
            session.backward(own)
            visible = torch.nn.utils.get_total_norm([p.grad for p in session.params if p.grad is not None])
            mean = sum(post[0] for post in mesh.world.exchange([own.item()])) / mesh.size
            alike = mesh.tensor.exchange([own.item()])
            assert alike == [alike[0]] * mesh.tensor.size, "ranks with parts of one model have another loss"
            optimizer.step()
            found = optimizer.get_grad_norm()
            assert found is not None
            expected = {"loss": loss, "norm": norm, "visible": norm}
            numbers = {"loss": mean, "norm": found, "visible": visible.item()}
            assert_close(wide(numbers), wide(expected), 1e-10, f"step {step}")
            with session.module.gathered():
                held = {fact.names[0]: p.detach() for fact, p in zip(facts, session.params, strict=True)}
                parts = {
                    f.names[0]: values[f.names[0]] if f.part is None else f.part.of(values[f.names[0]]) for f in facts
                }
                assert_close(held, parts, 1e-9, f"parameters after step {step}")


CASES = [(2, 2, "zero1"), (4, 2, "zero1"), (4, 4, "zero2"), (4, 2, "zero2_gloo"), (4, 2, "zero3"), (4, 2, "zero3_gloo")]
CASES += [(4, 2, "ddp"), (4, 2, "half"), (3, 3, "zero3"), (4, 2, "zero3_straddling")]


@pytest.mark.parametrize(("ranks", "tp", "name"), CASES)
def test_training_equals_plain_pytorch(ranks: int, tp: int, name: str) -> None:
    tensor = TensorPlan(architecture=Parts(gathers=True))
    plan = PLANS[name].but(tp=tp, max_norm=MAX_NORM, tensor=tensor)
    for tied in (False, True):
        run_ranks(ranks, trained, plan, tied)
