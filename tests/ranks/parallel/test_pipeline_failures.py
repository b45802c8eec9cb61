"""Steps that fail on one rank of a pipeline: every rank raises with rank and stage, and the next step succeeds.

Batches that differ between the ranks of one model are refused.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_pipeline_engine import LR, Steps, batch_of, case_of, plain
from test_pipeline_stages import criterion
from torch import Tensor, nn

from shardwise.core.comm import PeerError
from shardwise.plan import PipelinePlan, Plan
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.step_checks import assert_numbers
from tests.support.tensor_setup import Exact

LAYERS = 8
ONE = PipelinePlan(microbatches=4)
TWO = PipelinePlan(schedule="interleaved", chunks=2, microbatches=4)
ZBV = PipelinePlan(schedule="zbv", chunks=2, microbatches=4)


class Trap:
    """Raises in a rank's layer at the chosen call, once it is set."""

    def __init__(self, layer: nn.Module) -> None:
        self.turns, self.backward = -1, False
        layer.register_forward_pre_hook(lambda *_: None if self.backward else self.step())
        layer.register_forward_hook(self.follow)

    def set(self, turns: int, backward: bool) -> None:
        self.turns, self.backward = turns, backward

    def follow(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if self.backward and hidden.requires_grad:
            hidden.register_hook(lambda _grad: self.step())

    def step(self) -> None:
        self.turns -= 1
        if self.turns == -1:
            raise ArithmeticError("a trap")


def failing(plan: Plan, expected: Steps) -> None:
    model = case_of("llama", 1, LAYERS).made()  # with tied embeddings
    with sharded(model, adam(model, LR), plan) as session:
        pipeline, optimizer, rank = session.pipeline, session.optimizer, dist.get_rank()
        trap = Trap([layer for layer in model.model.layers if next(layer.parameters(), None) is not None][-1])

        def judge(outputs: Any, inputs: Any) -> Tensor:
            if where == "criterion":
                raise ArithmeticError("a trap")
            return criterion(outputs, inputs)

        for who, where, turns in (
            (1, "forward", 0),  # before any shape was sent
            (1, "forward", 2),
            (0, "backward", 1),
            (3, "backward", 0),
            (2, "forward", 0),
            (0 if plan.pipeline.schedule == "zbv" else 3, "criterion", 0),  # where the last stage is
        ):
            if rank == who and where != "criterion":
                trap.set(turns, where == "backward")
            words = r"in the (forward|backward) pass of stage \d, micro-batch \d: Arithmetic"
            error, words = (ArithmeticError, "^a trap") if rank == who else (PeerError, f"failed on rank {who} {words}")
            with pytest.raises(error, match=words), Exact():
                pipeline.step(batch_of(0, 1), judge, train=True)
            with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
                optimizer.step()
            optimizer.zero_grad()
            if where != "criterion":  # forward passes only
                if rank == who:
                    trap.set(0, False)
                with pytest.raises((ArithmeticError, PeerError)), torch.no_grad():
                    pipeline.step(batch_of(0, 0), judge, train=False)
        where = ""
        losses, _, values = expected[0]
        with Exact():
            outcome = pipeline.step(batch_of(0, 0), judge, train=True)
        if outcome.loss is not None:
            assert_numbers({"loss": outcome.loss.item()}, {"loss": losses[0]}, 1e-11, "the step after")
        optimizer.step()
        state = session.module.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-9, "parameters after it")


@pytest.mark.parametrize("pipeline", [ONE, *full(TWO, ZBV)], ids=lambda each: each.schedule)
def test_failed_step_raises_on_every_rank_and_training_continues(pipeline: PipelinePlan) -> None:
    plan = PLANS["zero2" if pipeline is ZBV else "zero1"].but(pp=4).but(pipeline=pipeline, max_norm=0.5)
    run_ranks(4, failing, plan, plain("llama", 1, LAYERS, 1, 4))


def among_replicas(plan: Plan) -> int:
    """Fail on a rank of one pipeline; return the number of failed steps until one succeeds."""
    model = case_of("llama", 0, LAYERS).made()
    with sharded(model, adam(model, LR), plan) as session:
        pipeline, optimizer = session.pipeline, session.optimizer
        trap = Trap(next(layer for layer in model.model.layers if next(layer.parameters(), None) is not None))
        if dist.get_rank() == 1:
            trap.set(1, True)
        for failed in range(4):
            try:
                with Exact():
                    pipeline.step(batch_of(session.mesh.rank, 1), criterion, train=True)
                optimizer.step()
                return failed
            except (ArithmeticError, PeerError):
                for _ in range(3):  # ranks of the other pipeline may be in another collective
                    try:
                        optimizer.zero_grad()
                        break
                    except PeerError:
                        continue
    raise AssertionError


@pytest.mark.parametrize("name", ["zero1", *full("zero2")])
def test_replicas_of_a_failed_pipeline_fail_and_continue_with_it(name: str) -> None:
    assert run_ranks(4, among_replicas, PLANS[name].but(pp=2, pipeline=ONE)) == [1] * 4


@on_ranks(2)
def test_loss_without_grad_is_an_error_on_every_rank() -> None:
    model = case_of("llama", 0).made()
    with sharded(model, adam(model), PLANS["zero1"].but(pp=2, pipeline=ONE)) as session:
        for judge, grads in ((lambda outputs, _: outputs.loss.detach(), True), (criterion, False)):
            with pytest.raises((RuntimeError, PeerError)) as error, torch.set_grad_enabled(grads):
                session.pipeline.step(batch_of(0, 0), judge, train=True)
            assert "loss of micro-batch 0 does not require grad" in str(error.value)
            assert ("failed on rank 1" in str(error.value)) == (dist.get_rank() == 0)
            session.optimizer.zero_grad()


@on_ranks(4)
def test_different_batches_are_refused_before_anything_is_sent() -> None:
    model = case_of("llama", 0).made()
    rank, batch = dist.get_rank(), batch_of(0, 0)
    other = batch | {"labels": batch["labels"].flip(0)}
    shapes = r"ranks \[0, 1, 2\]: attention_mask: int64\[5, 6\], input_ids: int64\[5, 6\].*rank 3: "
    values = r"4 ranks that hold one model were given 2 different batches \(of the same shapes.*"
    values += r"ranks \[0, 1, 3\]: .*; rank 2: "
    bad = (ValueError, "^a batch of dict") if rank == 1 else (PeerError, "^splitting the batch of a step failed:")
    with sharded(model, adam(model), PLANS["zero1"].but(pp=2, tp=2, pipeline=ONE)) as session:
        for mine, error, words in (
            (batch_of(0, rank == 3), ValueError, f"(?s){shapes}"),
            (other if rank == 2 else batch, ValueError, f"(?s){values}"),
            ({} if rank == 1 else batch, *bad),
        ):
            raises(error, words, session.pipeline.step, mine, criterion, train=True)
        raises(ValueError, "forward passes alone", session.pipeline.step, batch, criterion, train=rank == 0)
        session.pipeline.step(batch, criterion, train=True)
        session.optimizer.step()
