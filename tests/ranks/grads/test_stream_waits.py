"""Ranks that take different branches, over process groups whose waits are queued on a GPU stream: no deadlock.

The note in :mod:`shardwise.core.shards.gather_order` has the argument; these tests simulate the streams.
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.comm import Handle, NativeGroup
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer
from shardwise.core.shards.gather import ChunkPool
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import Breaks, adam, data, one_mesh, plain_steps, seeded, sharded
from tests.support.sets import full
from tests.support.stream_setup import (
    LAYERS,
    Branching,
    Program,
    QueuedGroup,
    begun_apart,
    groups_of,
    losses_of,
    plain,
    queued,
    stuck,
    train_on,
)

STEPS = 10


def alone(plan: Plan, steps: int, differ: bool) -> Program:
    """Do it wrongly: each rank starts reductions when its own gradients are there, and its stream waits for them."""
    with mock.patch.object(Reducer, "begin_in", lambda *_: None):
        return train_on(QueuedGroup, plan, steps, differ)[1]


def check(found: list[tuple[dict[str, Tensor], Program]], steps: int = STEPS, differ: bool = True) -> None:
    """Check that no stream waits for itself, and that the parameters are those of plain training."""
    assert stuck([program for _, program in found]) == []
    for rank, (state, _) in enumerate(found):
        assert_close(state, plain(len(found), steps, differ), 1e-9, f"rank {rank} of {len(found)}")


@pytest.mark.parametrize(("prefetch", "size"), [(1, 3), *full((0, 2), (2, 2), (0, 3), (1, 2), (2, 3))])
def test_different_branches_do_not_deadlock(size: int, prefetch: int) -> None:
    found = run_ranks(size, train_on, QueuedGroup, zero(3).but(prefetch=prefetch, same_order=False), STEPS, True)
    assert begun_apart([program for _, program in found]) == []
    check(found)


def test_reductions_that_a_rank_starts_alone_deadlock() -> None:
    """Show that the test above can fail."""
    programs = run_ranks(2, alone, zero(3).but(same_order=False), STEPS, True)
    assert stuck(programs) and begun_apart(programs)


class Layer(nn.Module):
    """A unit with a part that a rank may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return x + self.sometimes(x) if whole else x


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, index != left_out)
        return x


def leaves_out(passes_by: bool, at: int, passes: int) -> tuple[Program, dict[str, Tensor]]:
    """In step ``at``, rank 1 skips a part of one layer in the first pass, in program order."""
    plan = zero(3)
    stays = contextlib.nullcontext() if passes_by else mock.patch.object(Reducer, "pass_by", lambda *_: None)
    with queued() as program, stays:
        model = seeded(Layers)
        with one_mesh(plan) as mesh, sharded(model, adam(model, lr=0.01), plan, mesh) as session:
            for step in range(4):
                for index in range(passes):
                    left_out = LAYERS - 2 if (step, index) == (at, 0) and mesh.rank else -1
                    session.backward(session.module(data(mesh.rank, step), left_out).square().mean())
                session.optimizer.step()
            return program, session.module.state_dict()


@pytest.mark.parametrize("at", [0, 3])
def test_parameter_that_one_rank_skips_does_not_deadlock(at: int) -> None:
    """In the first step the order of gathers is not known yet."""
    model = seeded(Layers)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(data(rank, step), LAYERS - 2 if step == at and rank else -1).square().mean()

    plain_steps(model, adam(model, lr=0.01), 4, loss)
    found = run_ranks(2, leaves_out, True, at, 1)
    assert stuck([program for program, _ in found]) == []
    for rank, (_, state) in enumerate(found):
        assert_close(state, dict(model.state_dict()), 1e-9, f"rank {rank}")
    assert stuck([program for program, _ in run_ranks(2, leaves_out, False, at, 1)]), "the test cannot fail"


class Blind(QueuedGroup):
    """Gather without host waits: in a failing pass the host waits for no gather, since the values are not read."""

    failing = False

    def _start_gather(self, out: Tensor, shard: Tensor) -> Handle:
        if not Blind.failing:
            return super()._start_gather(out, shard)
        self.later.append(NativeGroup._start_gather(self, torch.empty_like(out), shard).wait)
        out.zero_()
        return self._queue("gather", None)


def fails_apart(in_time: bool) -> tuple[Program, dict[str, Tensor]]:
    """In step 1, rank 0 fails in backward two layers before rank 1, which has gathered and reduced these."""
    make_up, catch_up = ChunkPool.make_up, ChunkPool.catch_up

    def late(pool: ChunkPool) -> None:
        make_up(pool)
        catch_up(pool)

    wrong = mock.patch.multiple(ChunkPool, make_up=lambda _: None, catch_up=late)
    with queued() as program, groups_of(Blind), contextlib.nullcontext() if in_time else wrong:
        model, plan = seeded(Branching), zero(3).but(prefetch=0)
        with one_mesh(plan) as mesh, sharded(model, adam(model, lr=0.01), plan, mesh) as session:
            breaks = model.layers[3 - 2 * mesh.rank]
            for step in range(3):
                if step == 1:
                    hook = breaks.register_forward_hook(lambda _, __, out: Breaks.apply(out))
                    loss = losses_of(session.module, mesh.rank, step, False)
                    hook.remove()
                    with mock.patch.multiple(Breaks, armed=True), mock.patch.multiple(Blind, failing=True):
                        with pytest.raises(ArithmeticError):
                            session.backward(loss)
                        session.optimizer.zero_grad()
                session.backward(losses_of(session.module, mesh.rank, step, False))
                session.optimizer.step()
            return program, session.module.state_dict()


def test_ranks_that_fail_in_different_layers_do_not_deadlock() -> None:
    check([(state, program) for program, state in run_ranks(2, fails_apart, True)], 3, False)
    assert stuck([program for program, _ in run_ranks(2, fails_apart, False)]), "the test cannot fail"


@pytest.mark.parametrize(
    ("prefetch", "same_order"), [(0, None), *full((1, False), (2, None), (0, False), (1, None), (2, False))]
)
def test_reductions_begin_while_backward_runs(same_order: bool | None, prefetch: int) -> None:
    """If all ranks do the same, a buffer is free again when the layer after the next one needs it."""
    ranks = run_ranks(2, count_begun, zero(3).but(same_order=same_order, prefetch=prefetch), 4)
    for begun, copied in ranks:
        assert begun == [LAYERS] * 4, "all before their end is agreed on"
        assert copied == [0] * 4, "gradients had no buffer"


def count_begun(plan: Plan, steps: int) -> tuple[list[int], list[int]]:
    """Return, by pass, how many reductions had started when backward ended, and how many gradients had no buffer."""
    begun, copied = [], [0]
    finish, assign = Reducer.finish, Reducer._assign_bucket

    def finishing(reducer: Reducer, sync: bool) -> None:
        begun.append(reducer.begun)
        finish(reducer, sync)
        copied.append(0)

    def assigning(reducer: Reducer, state: ChunkGrads) -> None:
        assign(reducer, state)
        copied[-1] += state.buffer is None

    with mock.patch.multiple(Reducer, finish=finishing, _assign_bucket=assigning):
        train_on(QueuedGroup, plan, steps, False)
    return begun, copied[:-1]
