"""Engines over tensor-parallel layers, compared with plain PyTorch in one process in fp64: every plan, dp x tp."""

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
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.on_ranks import everywhere, on_ranks, raises
from tests.support.sets import full
from tests.support.step_checks import assert_numbers, assert_parts
from tests.support.tensor_model import INNER, VOCABULARY, WIDTH, Model, Parts, made, rows_of
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
    """Return, by step, the mean loss, the norm before clipping, and the parameters."""
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


TENSOR = TensorPlan(architecture=Parts(gathers=True))


def trained(plan: Plan, tied: bool) -> None:
    model: Model = made(tied)
    with sharded(model, adam(model, LR), plan.but(max_norm=MAX_NORM, tensor=TENSOR)) as session:
        mesh, optimizer = session.mesh, session.optimizer
        assert mesh.tensor.size == plan.mesh.tp
        for step, (loss, norm, values) in enumerate(plain(tied, mesh.size)):
            own = loss_of(session.module, mesh.rank, step)
            session.backward(own)
            visible = torch.nn.utils.get_total_norm([p.grad for p in session.params if p.grad is not None])
            mean = sum(post[0] for post in mesh.world.exchange([own.item()])) / mesh.size
            alike = mesh.tensor.exchange([own.item()])
            assert alike == [alike[0]] * mesh.tensor.size, "ranks with parts of one model have another loss"
            optimizer.step()
            numbers = {"loss": mean, "norm": optimizer.get_grad_norm(), "visible": visible.item()}
            assert_numbers(numbers, {"loss": loss, "norm": norm, "visible": norm}, 1e-10, f"step {step}")
            assert_parts(session, values, f"parameters after step {step}")


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
    for tied in (False, True):
        run_ranks(ranks, trained, PLANS[name].but(tp=tp), tied)


MIXES = full(*((name, mix) for name in ("zero2", "zero3") for mix in ("all_host", "all_disk", "thirds")))


@pytest.mark.parametrize(("name", "mix"), [*MIXES[:-1], ("zero3", "thirds")])
def test_offload_does_not_change_results_of_tensor_parallelism(name: str, mix: str, tmp_path: Path) -> None:
    run_ranks(4, trained, with_tiers(PLANS[name], mix, str(tmp_path)).but(tp=2), True)


@on_ranks(4)
@pytest.mark.parametrize("stage", [*full(1), 3])
def test_overflow_on_one_tensor_parallel_rank_skips_the_step_on_all(stage: Literal[1, 3]) -> None:
    """One rank has an infinite gradient in its part of a parameter."""
    plan = zero(stage, torch.float16)
    plan = plan.but(tp=2, scaler=replace(plan.precision.scaler, initial_scale=8.0), tensor=TENSOR)  # type: ignore[type-var]
    for holder in (0, 3):
        model: Model = made(False)
        spoils = [False]
        model.blocks[0].up.weight.register_hook(lambda grad, spoils=spoils: grad * float("inf") if spoils[0] else grad)
        with sharded(model, adam(model), plan) as session:
            optimizer = session.optimizer
            for step in range(3):
                spoils[0] = step == 1 and session.mesh.mesh_group.rank == holder
                session.backward(loss_of(session.module, session.mesh.rank, step))
                optimizer.step()
                found = everywhere((optimizer.last_step_skipped, optimizer.scaler.scale))
                assert found == [(step == 1, optimizer.scaler.scale)] * 4


class Broken:
    def collect(self, _model: torch.nn.Module, _cutting: object) -> None:
        raise ValueError("this rank cannot cut it")


@on_ranks(4)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("model", "give dim 0 and 21"),
        ("unknown", "(?s)Model cannot be cut: .*register_architecture.*bert"),
        ("fails", "cannot cut it"),
    ],
)
def test_failed_partition_raises_on_all_ranks_and_changes_nothing(what: str, told: str) -> None:
    model: Model = made(False)
    rank, tensor = dist.get_rank(), TENSOR
    if what == "model" and rank == 3:
        model.blocks[0].up = torch.nn.Linear(WIDTH, INNER + 1).double()
    if what == "unknown":
        tensor = TensorPlan()
    if what == "fails" and rank == 2:
        tensor = TensorPlan(architecture=Broken())
    before = {name: (type(module), list(vars(module))) for name, module in model.named_modules()}
    values = [param.detach().clone() for param in model.parameters()]
    raises((ValueError, PeerError), told, build, model, adam(model), PLANS["zero2"].but(tp=2, tensor=tensor))
    assert {name: (type(module), list(vars(module))) for name, module in model.named_modules()} == before
    assert all(map(torch.equal, values, model.parameters()))


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_bytes_match_the_formula(ranks: int) -> None:
    """A block sums activations twice forward and twice backward, the embedding once, the head's input once.

    The logits are gathered.
    """
    activations = 3 * 7 * WIDTH * 8
    sums, gathers = (2 * 4 + 1 + 1) * 2 * (ranks - 1) * activations, (ranks - 1) * 3 * 7 * rows_of(ranks).size * 8
    model: Model = made(False)
    with sharded(model, adam(model), PLANS["zero1"].but(tp=ranks, tensor=TENSOR)) as session:
        session.backward(loss_of(session.module, session.mesh.rank, 0))
        session.reset_traffic()
        session.backward(loss_of(session.module, session.mesh.rank, 1))
        found = session.mesh.tensor.traffic.bytes
        assert (found["all_reduce"], found["all_gather"]) == (sums // ranks, gathers // ranks)
        assert found["reduce_scatter"] == found["broadcast"] == 0


class Noisy(Model):
    """A model with dropout."""

    def __init__(self, tied: bool) -> None:
        super().__init__(tied)
        self.noise = torch.nn.Dropout(0.25)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(ids)
        return self.noise(logits)  # type: ignore[no-any-return]


@on_ranks(4)
@pytest.mark.parametrize("when", ["before", "after"])
def test_replicated_values_have_the_same_dropout(when: str) -> None:
    """Ranks get one seed when they are sharded; seeds that differ afterwards are an error."""
    torch.manual_seed(dist.get_rank())
    model = Noisy(False).double()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    with sharded(model, adam(model, LR), PLANS["zero1"].but(tp=2, max_norm=MAX_NORM, tensor=TENSOR)) as session:
        optimizer, rank = session.optimizer, session.mesh.rank
        if when == "after":
            torch.manual_seed(dist.get_rank())
        loss = loss_of(session.module, rank, 0)
        one, other = session.mesh.tensor.exchange([loss.item()])
        assert (one == other) == (when == "before")
        session.backward(loss)
        if when == "after":
            message = raises(RuntimeError, "one seed", optimizer.step)
            assert "Dropout.p=0.25" in message, message
            optimizer.zero_grad()
            session.module.eval()
            session.backward(loss_of(session.module, rank, 0))
        optimizer.step()  # no random numbers in evaluation
