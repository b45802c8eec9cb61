"""Engines over a model whose layers are cut, against plain PyTorch in one process: fp64, every plan, dp x tp."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardwise.core.comm import PeerError
from shardwise.plan import Plan, TensorPlan, zero
from shardwise.session import build
from shardwise.testing import assert_close, run_ranks
from tests.support.cut_setup import INNER, VOCABULARY, WIDTH, Model, Parts, made, rows_of
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.sets import full
from tests.support.tier_setup import with_tiers

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


def trained(plan: Plan, tied: bool) -> None:
    model: Model = made(tied)
    with sharded(model, adam(model, LR), plan) as session:
        mesh, optimizer = session.mesh, session.optimizer
        assert optimizer is not None and mesh.tensor.size == plan.mesh.tp
        facts = session.engine.shards.layout.facts
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


CASES: list[object] = [
    (2, 2, "zero1"),
    *full((4, 2, "zero1"), (4, 4, "zero2")),
    (4, 2, "zero2_gloo"),
    (4, 2, "zero3"),
    *full((4, 2, "zero3_gloo"), (4, 2, "ddp"), (4, 2, "half")),
    (3, 3, "zero3"),
    *full((4, 2, "zero3_straddling")),
]


@pytest.mark.parametrize(("ranks", "tp", "name"), CASES)
def test_training_equals_plain_pytorch(ranks: int, tp: int, name: str) -> None:
    tensor = TensorPlan(architecture=Parts(gathers=True))
    plan = PLANS[name].but(tp=tp, max_norm=MAX_NORM, tensor=tensor)
    for tied in (False, True):
        run_ranks(ranks, trained, plan, tied)


MIXES = full(*((name, mix) for name in ("zero2", "zero3") for mix in ("all_host", "all_disk", "thirds")))


@pytest.mark.parametrize(("name", "mix"), [*MIXES[:-1], ("zero3", "thirds")])
def test_tiers_change_nothing(name: str, mix: str, tmp_path: Path) -> None:
    tensor = TensorPlan(architecture=Parts(gathers=True))
    plan = with_tiers(PLANS[name], mix, str(tmp_path)).but(tp=2, max_norm=MAX_NORM, tensor=tensor)
    run_ranks(4, trained, plan, True)


def overflowing(plan: Plan, holder: int) -> list[tuple[bool, float]]:
    """An infinite gradient of a part that one rank holds."""
    model: Model = made(False)
    spoils = [False]
    weight = model.blocks[0].up.weight
    weight.register_hook(lambda grad: grad * float("inf") if spoils[0] else grad)
    found = []
    with sharded(model, adam(model, LR), plan) as session:
        mesh, optimizer = session.mesh, session.optimizer
        for step in range(3):
            spoils[0] = step == 1 and mesh.mesh_group.rank == holder
            session.backward(loss_of(session.module, mesh.rank, step))
            optimizer.step()
            found.append((optimizer.last_step_skipped, optimizer.scaler.scale))
    return found


@pytest.mark.parametrize("stage", [*full(1), 3])
def test_an_overflow_of_one_part_skips_the_step_on_all(stage: Literal[1, 3]) -> None:
    plan = zero(stage, torch.float16)
    assert plan.precision.scaler is not None
    scaler = replace(plan.precision.scaler, initial_scale=8.0)
    plan = plan.but(tp=2, scaler=scaler, tensor=TensorPlan(architecture=Parts(True)))
    for holder in (0, 3):
        results = run_ranks(4, overflowing, plan, holder)
        assert [skipped for skipped, _ in results[0]] == [False, True, False], results[0]
        assert all(result == results[0] for result in results)


class Broken:
    def collect(self, _model: torch.nn.Module, _cutting: object) -> None:
        raise ValueError("this rank cannot cut it")


def refused(what: str) -> str:
    model: Model = made(False)
    rank = dist.get_rank()
    tensor = TensorPlan(architecture=Parts(gathers=True))
    if what == "model" and rank == 3:
        model.blocks[0].up = torch.nn.Linear(WIDTH, INNER + 1).double()
    if what == "unknown":
        tensor = TensorPlan()
    if what == "fails" and rank == 2:
        tensor = TensorPlan(architecture=Broken())
    before = {name: (type(module), list(vars(module))) for name, module in model.named_modules()}
    values = [param.detach().clone() for param in model.parameters()]
    with pytest.raises((ValueError, PeerError)) as error:
        build(model, adam(model), PLANS["zero2"].but(tp=2, tensor=tensor))
    assert {name: (type(module), list(vars(module))) for name, module in model.named_modules()} == before
    assert all(map(torch.equal, values, model.parameters()))
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("model", "give dim 0 and 21"),
        ("unknown", "Model cannot be cut: .*bert.*register_architecture"),
        ("fails", "cannot cut it"),
    ],
)
def test_what_cannot_be_cut_alike_is_told_to_all_and_changes_nothing(what: str, told: str) -> None:
    for message in run_ranks(4, refused, what):
        assert re.search(told, message, re.DOTALL), message


def counted(plan: Plan) -> dict[str, int]:
    model: Model = made(False)
    with sharded(model, adam(model), plan) as session:
        session.backward(loss_of(session.module, session.mesh.rank, 0))
        session.reset_traffic()
        session.backward(loss_of(session.module, session.mesh.rank, 1))
        return dict(session.mesh.tensor.traffic.bytes)


def test_bytes_between_parts_follow_the_formula() -> None:
    """A block sums activations twice forward and twice backward, the embedding once, the head's input once; logits are
    gathered."""
    for ranks, tp in ((2, 2), (4, 4)):
        tensor = TensorPlan(architecture=Parts(gathers=True))
        rows = rows_of(tp).size
        activations = 3 * 7 * WIDTH * 8
        expected = (2 * 4 + 1 + 1) * 2 * (tp - 1) * activations // tp, (tp - 1) * 3 * 7 * rows * 8 // tp
        for found in run_ranks(ranks, counted, PLANS["zero1"].but(tp=tp, tensor=tensor)):
            assert (found["all_reduce"], found["all_gather"]) == expected
            assert found["reduce_scatter"] == found["broadcast"] == 0


class Noisy(Model):
    """With dropout between its layers."""

    def __init__(self, tied: bool) -> None:
        super().__init__(tied)
        self.noise = torch.nn.Dropout(0.25)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(ids)
        return self.noise(logits)  # type: ignore[no-any-return]


def drawing(when: str) -> str:
    """Ranks with the same data draw alike, whatever their seeds were before, or are told."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Noisy(False).double()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    plan = PLANS["zero1"].but(tp=2, max_norm=MAX_NORM, tensor=TensorPlan(architecture=Parts(gathers=True)))
    told = ""
    with sharded(model, adam(model, LR), plan) as session:
        optimizer = session.optimizer
        if when == "after":
            torch.manual_seed(rank)
        loss = loss_of(session.module, session.mesh.rank, 0)
        alike = [post[0] for post in session.mesh.tensor.exchange([loss.item()])]
        assert (alike[0] == alike[1]) == (when == "before")
        session.backward(loss)
        try:
            optimizer.step()
        except RuntimeError as error:
            told = str(error)
            optimizer.zero_grad()
            session.module.eval()
            session.backward(loss_of(session.module, session.mesh.rank, 0))
            optimizer.step()  # nothing is drawn
    return told


def test_ranks_that_hold_the_same_draw_the_same() -> None:
    assert run_ranks(4, drawing, "before") == [""] * 4
    for told in run_ranks(4, drawing, "after"):
        assert "Dropout.p=0.25" in told and "one seed" in told, told
