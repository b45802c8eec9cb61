"""Steps that fail on one rank of a pipeline: every rank is told what and where, and the next step is one like any
other; batches that differ between the ranks of one model are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_pipeline_engine import LR, Steps, batch_of, case_of, plain, wide
from test_pipeline_stages import criterion
from torch import Tensor, nn

from shardwise.core.comm import PeerError
from shardwise.plan import PipelinePlan, Plan
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, adam, sharded
from tests.support.sets import full
from tests.support.tensor_setup import Exact

LAYERS = 8
ONE = PipelinePlan(microbatches=4)
TWO = PipelinePlan(schedule="interleaved", chunks=2, microbatches=4)
ZBV = PipelinePlan(schedule="zbv", chunks=2, microbatches=4)


class Trap:
    """Raises in a rank's layer when it is set, at a turn."""

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


def failing(plan: Plan, expected: Steps) -> list[str]:
    model = case_of("llama", 1, LAYERS).made()  # its embeddings are tied
    told = []
    with sharded(model, adam(model, LR), plan) as session:
        pipeline, optimizer, rank = session.pipeline, session.optimizer, dist.get_rank()
        layers = [layer for layer in model.model.layers if next(layer.parameters(), None) is not None]
        trap = Trap(layers[-1])

        def judge(outputs: Any, inputs: Any) -> Tensor:
            if where == "criterion":
                raise ArithmeticError("a trap")
            return criterion(outputs, inputs)

        for who, where, turns in (
            (1, "forward", 0),  # before any shape was told
            (1, "forward", 2),
            (0, "backward", 1),
            (3, "backward", 0),
            (2, "forward", 0),
            (None, "criterion", 0),
        ):
            if rank == who:
                trap.set(turns, where == "backward")
            with pytest.raises((ArithmeticError, PeerError)) as error, Exact():
                pipeline.step(batch_of(0, 1), judge, train=True)
            mine = rank == who or (who is None and pipeline.last)
            assert isinstance(error.value, ArithmeticError) == mine
            told.append(str(error.value))
            with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
                optimizer.step()
            optimizer.zero_grad()
            where = ""
            if rank == who:
                trap.set(0, False)
            if who is not None:  # forward passes alone
                with pytest.raises((ArithmeticError, PeerError)), torch.no_grad():
                    pipeline.step(batch_of(0, 0), judge, train=False)
        where = ""
        losses, _, values = expected[0]
        with Exact():
            outcome = pipeline.step(batch_of(0, 0), judge, train=True)
        if outcome.loss is not None:
            assert_close(wide(loss=outcome.loss.item()), wide(loss=losses[0]), 1e-11, "the step after")
        optimizer.step()
        state = session.module.state_dict()
        assert_close({name: state[name] for name in values}, values, 1e-9, "parameters after it")
    return told


@pytest.mark.parametrize("pipeline", [ONE, *full(TWO, ZBV)], ids=lambda each: each.schedule)
def test_every_rank_is_told_of_a_step_that_failed_and_goes_on(pipeline: PipelinePlan) -> None:
    plan = PLANS["zero2" if pipeline is ZBV else "zero1"].but(pp=4).but(pipeline=pipeline, max_norm=0.5)
    found = run_ranks(4, failing, plan, plain("llama", 1, LAYERS, 1, 4))
    last = 0 if pipeline is ZBV else 3
    for turn, who in enumerate((1, 1, 0, 3, 2, last)):
        for rank, told in enumerate(found):
            if rank == who:
                assert told[turn] == "a trap"
            else:
                words = rf"failed on rank {who} in the (forward|backward) pass of stage \d, micro-batch \d: Arithmetic"
                assert re.search(words, told[turn]), told[turn]


def among_replicas(plan: Plan) -> int:
    """A rank of one pipeline fails: after how many steps that did not come to their end they do again."""
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
                for _ in range(3):  # ranks of the other pipeline come to it from elsewhere
                    try:
                        optimizer.zero_grad()
                        break
                    except PeerError:
                        continue
    raise AssertionError


@pytest.mark.parametrize("name", ["zero1", *full("zero2")])
def test_replicas_of_a_pipeline_that_failed_go_on_with_it(name: str) -> None:
    assert run_ranks(4, among_replicas, PLANS[name].but(pp=2, pipeline=ONE)) == [1] * 4


def untrained() -> list[str]:
    told = []
    model = case_of("llama", 0).made()
    with sharded(model, adam(model), PLANS["zero1"].but(pp=2, pipeline=ONE)) as session:
        pipeline, optimizer = session.pipeline, session.optimizer
        for judge, grads in ((lambda outputs, _: outputs.loss.detach(), True), (criterion, False)):
            with pytest.raises((RuntimeError, PeerError)) as error, torch.set_grad_enabled(grads):
                pipeline.step(batch_of(0, 0), judge, train=True)
            told.append(str(error.value))
            optimizer.zero_grad()
    return told


def test_a_loss_that_trains_nothing_is_an_error_on_every_rank() -> None:
    for rank, told in enumerate(run_ranks(2, untrained)):
        for text in told:
            assert "loss of micro-batch 0 does not require grad" in text and ("failed on rank 1" in text) == (rank == 0)


def differing() -> list[str]:
    told = []
    model = case_of("llama", 0).made()
    rank = dist.get_rank()
    with sharded(model, adam(model), PLANS["zero1"].but(pp=2, tp=2, pipeline=ONE)) as session:
        pipeline, optimizer = session.pipeline, session.optimizer
        batch = batch_of(0, 0)
        other = batch | {"labels": batch["labels"].flip(0)}
        for mine in (batch_of(0, rank == 3), other if rank == 2 else batch, {} if rank == 1 else batch):
            with pytest.raises((ValueError, PeerError)) as error:
                pipeline.step(mine, criterion, train=True)
            told.append(f"{type(error.value).__name__}: {error.value}")
        with pytest.raises(ValueError, match="forward passes alone"):
            pipeline.step(batch, criterion, train=rank == 0)
        pipeline.step(batch, criterion, train=True)
        optimizer.step()
    return told


def test_batches_that_differ_are_refused_before_anything_is_sent() -> None:
    for rank, (shapes, values, bad) in enumerate(run_ranks(4, differing)):
        assert "ranks [0, 1, 2]: attention_mask: int64[5, 6], input_ids: int64[5, 6]" in shapes and "rank 3: " in shapes
        assert "4 ranks that hold one model were given 2 different batches (of the same shapes" in values
        assert "ranks [0, 1, 3]: " in values and "; rank 2: " in values
        kind = "ValueError: a batch of dict" if rank == 1 else "PeerError: splitting the batch of a step failed:"
        assert bad.startswith(kind), bad
