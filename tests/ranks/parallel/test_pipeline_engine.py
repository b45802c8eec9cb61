"""Engines over pipeline stages, compared with plain PyTorch in one process in fp64: pp x tp x dp, plans, tied
weights."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pipeline_stages import criterion
from torch import Tensor

from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.core.parallel.pipeline.schedule import make_schedule
from shardwise.plan import PipelinePlan, Plan
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.parity.hybrid import with_layers
from tests.support import tensor_cases
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.step_checks import assert_numbers, assert_parts
from tests.support.tensor_setup import PAD, Case, Exact, loss_of
from tests.support.tier_setup import with_tiers

STEPS, LR, MAX_NORM, ROWS, LENGTH = 3, 0.01, 0.5, 5, 6


def case_of(name: str, index: int, layers: int = 5) -> Case:
    return with_layers(getattr(tensor_cases, name)()[index], layers)


def batch_of(rank: int, step: int) -> dict[str, Tensor]:
    """Return a batch; one step has another sequence length."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids, labels = torch.randint(0, PAD, (2, ROWS, LENGTH + step % 2), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "labels": labels, "attention_mask": mask}


Steps = list[tuple[list[float], float, dict[str, Tensor]]]


@functools.cache
def plain(name: str, index: int, layers: int, replicas: int, microbatches: int) -> Steps:
    """Return, by step, each replica's loss, the norm before clipping, and the parameters.

    The test computes them once for its ranks: on each rank they would take longer than its own stages.
    """
    found: Steps = []
    model = case_of(name, index, layers).made()
    optimizer = adam(model, LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank in range(replicas):
            total = 0.0
            for part in split_batch(batch_of(rank, step), microbatches, None):
                with Exact():
                    loss = loss_of(model(**part.kwargs)) * part.share
                (loss / replicas).backward()
                total += loss.item()
            losses.append(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        found.append((losses, norm.item(), {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def train(ranks: int, plan: Plan, name: str, index: int, microbatches: int, timeout: float = 60.0) -> None:
    """Compare ranks with plain PyTorch."""
    layers, replicas = sum(plan.pipeline.layers or (5,)), ranks // plan.mesh.pp // plan.mesh.tp
    expected = plain(name, index, layers, replicas, microbatches)
    run_ranks(ranks, trained, plan, name, index, expected, timeout=timeout)


def trained(plan: Plan, name: str, index: int, expected: Steps) -> None:
    model = case_of(name, index, sum(plan.pipeline.layers or (5,))).made()
    names = {id(param): name for name, param in model.named_parameters()}
    with sharded(model, adam(model, LR), plan) as session:
        mesh, optimizer, pipeline = session.mesh, session.optimizer, session.pipeline
        assert mesh.pipeline.size == plan.mesh.pp
        if plan.pipeline.orders is not None:
            assert pipeline._schedule(3).orders[0][-6:] != make_schedule("zbv", 2, 2, 3).orders[0][-6:]
            # the orders are for steps of three micro-batches
            assert pipeline._schedule(2) == make_schedule("zbv", 2, 2, 2)
        for step, (losses, norm, values) in enumerate(expected):
            assert len(losses) == mesh.size
            with Exact():
                outcome = pipeline.step(batch_of(mesh.rank, step), criterion, train=True)
            assert (outcome.loss is not None) == pipeline.last
            if outcome.loss is not None:
                assert_numbers({"loss": outcome.loss.item()}, {"loss": losses[mesh.rank]}, 1e-11, f"step {step}")
            optimizer.step()
            assert_numbers({"norm": optimizer.get_grad_norm()}, {"norm": norm}, 1e-10, f"step {step}")
            held = assert_parts(session, values, f"parameters after step {step}", lambda param: names[id(param)])
        everywhere = {name for post in mesh.pipeline.exchange_object(sorted(held)) for name in post}
        assert everywhere == set(values)


ONE, TWO = PipelinePlan(microbatches=3), PipelinePlan(schedule="interleaved", chunks=2, microbatches=4)
ZBV = PipelinePlan(schedule="zbv", chunks=2, microbatches=4)


def weights_last(ranks: int, microbatches: int) -> tuple[tuple[str, ...], ...]:
    """Return the zbv schedule with all gradients of weights at its end."""
    orders = (map(str, order) for order in make_schedule("zbv", ranks, 2, microbatches).orders)
    return tuple(tuple(sorted(order, key=lambda text: "W" in text)) for order in orders)


OWN = PipelinePlan(schedule="zbv", chunks=2, microbatches=3, orders=weights_last(2, 3))
CASES: list[tuple[int, str, dict[str, Any], PipelinePlan]] = [
    (2, "zero1", {}, ONE),
    (4, "zero1", {}, ONE),
    (4, "zero1", {}, TWO),
    (4, "ddp", {}, ONE),
    (4, "zero2", {}, ONE),
    (4, "zero3", {}, ONE),
    (4, "zero3_gloo", {}, TWO),
    (4, "zero1", {"tp": 2}, ONE),
    (4, "zero1", {"pp": 4}, PipelinePlan(layers=(1, 2, 1, 1), microbatch_rows=2)),
    (4, "zero2", {}, ZBV),
    (4, "zero1", {"tp": 2}, ZBV),
    (4, "zero3_gloo", {}, OWN),
    (4, "ddp", {"pp": 4}, PipelinePlan(schedule="zbv", chunks=2, microbatch_rows=1, layers=(1, 1, 1, 2, 1, 1, 1, 1))),
    (4, "zero2_gloo", {"dp_outside": True}, PipelinePlan(microbatches=3, cache_shapes=False)),
]


MODELS = (("llama", 1), ("gpt2", 0), ("bert", 0))


QUICK = (0, 2, 5, 8, 10)
"""Cases with a pipeline alone, each schedule, unsharded and sharded parameters, tensor parallelism, and own stages."""


def by_turns() -> list[object]:
    """Pair each plan with one of the models in turn; the campaign has the other pairs."""
    rows: list[object] = []
    for at, case in enumerate(CASES):
        for kind, model in enumerate(MODELS):
            now = [(*case, *model)] if at in QUICK else full((*case, *model))
            rows += now if (at + kind) % 3 == 0 else campaign((*case, *model))
    return rows


@pytest.mark.parametrize(("ranks", "name", "sizes", "pipeline", "model", "index"), by_turns())
def test_training_equals_plain_pytorch(
    ranks: int, name: str, sizes: dict[str, Any], pipeline: PipelinePlan, model: str, index: int
) -> None:
    plan = PLANS[name].but(pp=2).but(**sizes).but(max_norm=MAX_NORM, pipeline=pipeline)
    assert plan.grad.average == "sum"
    microbatches = pipeline.microbatches or -(-ROWS // (pipeline.microbatch_rows or ROWS))
    train(ranks, plan, model, index, microbatches)


@on_ranks(2)
def test_unsupported_pipeline_settings_are_refused() -> None:
    """Clipping one stage alone would be wrong without an error; other settings cannot be used with stages."""
    for changes, words in (({"output_dtype": torch.float32}, "output_dtype"), ({"average": "mean"}, "average='mean'")):
        model = case_of("llama", 0).made()
        plan = PLANS["zero1"].but(pp=2, **changes)
        raises((ValueError, NotImplementedError), words, build, model, adam(model), plan)
    model = case_of("llama", 0).made()
    with sharded(model, adam(model, LR), PLANS["zero2"].but(pp=2, pipeline=ONE)) as session:
        with Exact():
            session.pipeline.step(batch_of(0, 0), criterion, train=True)
        words = "stages only(.|\n)*2 pipeline ranks|2 pipeline ranks(.|\n)*stages only"
        raises(RuntimeError, words, torch.nn.utils.clip_grad_norm_, session.params, 1.0)


@pytest.mark.parametrize(
    ("name", "mix", "pipeline", "tp"),
    [("zero3", "all_disk", ONE, 1), *full(("zero2", "thirds", ZBV, 1), ("zero1", "thirds", ONE, 2))],
)
def test_offload_does_not_change_results(name: str, mix: str, pipeline: PipelinePlan, tp: int, tmp_path: Path) -> None:
    plan = with_tiers(PLANS[name], mix, str(tmp_path)).but(pp=2, tp=tp, max_norm=MAX_NORM, pipeline=pipeline)
    train(4, plan, "llama", 1, pipeline.microbatches, timeout=240)
