"""Offload to the host without waiting: gradients land when they are read, uploads have a stream of their own.

Ranks on different branches over groups whose waits are queued on a GPU: nothing waits for itself.

The note in :mod:`shardwise.core.shards.gather_order` has the argument; here it is tried.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from wait_setup import quick_patience

from shardwise.core.comm import DONE, Buffer, Handle, LocalGroup, NativeGroup
from shardwise.core.grads import offload as landing
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.offload import MAX_IN_FLIGHT, _Copy
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.tier import Tier
from shardwise.core.shards import source
from shardwise.core.shards.pool import ChunkPool
from shardwise.core.shards.source import MemorySource
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
from tests.support.tier_setup import with_tiers

STEPS, PASSES = 3, 3


class Slow(_Copy):
    """Memory has its values no sooner than it is waited for."""

    waits = 0
    threads: ClassVar[set[str]] = set()

    def __init__(self, memory: Tensor, out: Tensor, *_: object) -> None:
        self._memory, self._values = memory, out.clone()
        memory.fill_(float("nan"))

    def land(self) -> None:
        Slow.waits += 1
        Slow.threads.add(threading.current_thread().name.split("_")[0])
        self._memory.copy_(self._values)


def train_early(stage: int, ahead: bool) -> tuple[dict[str, Tensor], set[str]]:
    """The parameters under updates during backward, and the threads that waited for gradients."""
    plan = with_tiers(zero(stage), "s_host", "no disk is used").but(update="backward")
    model = seeded(Branching)
    Slow.threads.clear()
    stream = "a stream" if ahead else None
    with (
        mock.patch.multiple(landing, side_stream=lambda _device: stream, _Copy=Slow),
        one_mesh(plan) as mesh,
        sharded(model, adam(model, lr=0.01), plan, mesh) as session,
    ):
        for step in range(STEPS):
            session.backward(losses_of(session.module, mesh.rank, step, False))
            session.optimizer.step()
        return session.module.state_dict(), set(Slow.threads)


@pytest.mark.parametrize("stage", [2, 3])
def test_updates_during_backward_wait_in_their_own_thread(stage: int) -> None:
    ranks = zip(run_ranks(2, train_early, stage, True), run_ranks(2, train_early, stage, False), strict=True)
    for (late, threads), (now, none) in ranks:
        assert threads == {"shardwise-update"} and none == set()
        assert all(torch.equal(late[name], now[name]) for name in now)


def train(stage: int, ahead: bool) -> tuple[dict[str, Tensor], list[int], int, int]:
    """The parameters; how often the host waited in each pass; gradient memory on the host, and what is kept of it."""
    plan = with_tiers(zero(stage), "s_host", "no disk is used")
    model = seeded(Branching)
    with contextlib.ExitStack() as stack:
        if ahead:
            stack.enter_context(mock.patch.object(landing, "side_stream", lambda _device: "a stream"))
            stack.enter_context(mock.patch.object(landing, "_Copy", Slow))
        mesh = stack.enter_context(one_mesh(plan))
        session = stack.enter_context(sharded(model, adam(model, lr=0.01), plan, mesh))
        waited = []
        for step in range(STEPS):
            for index in range(PASSES):
                Slow.waits = 0
                session.backward(losses_of(session.module, mesh.rank, PASSES * step + index, False))
                waited.append(Slow.waits)
            session.optimizer.step()
        kept = sum(m.nbytes for s in session.engine.grads.states.values() if (m := s.kept_memory) is not None)
        return session.module.state_dict(), waited, session.engine.grads.reducer.bytes(Tier.HOST), kept


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_land_when_they_are_read(stage: int) -> None:
    ranks = zip(run_ranks(2, train, stage, True), run_ranks(2, train, stage, False), strict=True)
    for (late, waited, held, kept), (now, never, _, _) in ranks:
        assert set(never) == {0}
        assert waited[0::PASSES] == [0] * STEPS, "the first pass of a step only queues copies"
        assert all(0 < count <= 4 * LAYERS for count in waited[1::PASSES]), waited
        assert all(torch.equal(late[name], now[name]) for name in now)
        assert 0 < held - kept <= MAX_IN_FLIGHT * kept, "blocks are used again"


class FakeStream:
    """Notes what is queued where."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Noting(LocalGroup):
    """Of what look like two ranks."""

    def __init__(self, log: list[str], current: list[str]) -> None:
        super().__init__("test", torch.device("meta"))
        self.size, self._log, self._current = 2, log, current

    def _all_gather(self, out: Tensor, shard: Buffer) -> Handle:
        self._log.append(f"gather on {self._current[-1]}")
        return DONE


def test_with_several_ranks_uploads_have_a_stream_of_their_own() -> None:
    log: list[str] = []
    current = ["compute"]
    uploads: Any = FakeStream("uploads", log)

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    now: Callable[[Any], FakeStream] = lambda _device: FakeStream(current[-1], log)  # noqa: E731
    with mock.patch.multiple(source.torch.cuda, stream=on, current_stream=now):
        shard = MemorySource(Buffer(torch.ones(3)), Tier.HOST, uploads)
        handle = shard.gather(Noting(log, current), torch.empty(6, device="meta"))
    assert log == ["uploads waits for compute", "gather on uploads"]
    handle.wait()


WAITS_STEPS = 10


def alone(plan: Plan, steps: int, differ: bool) -> Program:
    """A wrong way: each rank begins reductions when its own gradients are there, and its stream waits for them."""
    with mock.patch.object(Reducer, "begin_in", lambda *_: None):
        return train_on(QueuedGroup, plan, steps, differ)[1]


def check(found: list[tuple[dict[str, Tensor], Program]], steps: int = WAITS_STEPS, differ: bool = True) -> None:
    """No program waits for itself, and all have the parameters of plain training."""
    assert stuck([program for _, program in found]) == []
    for rank, (state, _) in enumerate(found):
        assert_close(state, plain(len(found), steps, differ), 1e-9, f"rank {rank} of {len(found)}")


@pytest.mark.parametrize(("prefetch", "size"), [(1, 3), *full((0, 2), (2, 2), (0, 3), (1, 2), (2, 3))])
def test_branches_that_differ_close_no_cycle(size: int, prefetch: int) -> None:
    found = run_ranks(size, train_on, QueuedGroup, zero(3).but(prefetch=prefetch, same_order=False), WAITS_STEPS, True)
    assert begun_apart([program for _, program in found]) == []
    check(found)


def test_a_rank_that_begins_reductions_alone_closes_one() -> None:
    """The tests above can fail."""
    programs = run_ranks(2, alone, zero(3).but(same_order=False), WAITS_STEPS, True)
    assert stuck(programs) and begun_apart(programs)


class Layer(nn.Module):
    """A unit with a part that a rank may leave out."""

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
    """In step ``at`` rank 1 leaves out a part of one layer in the first pass, in program order."""
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
def test_a_parameter_that_one_rank_leaves_out_closes_no_cycle(at: int) -> None:
    """In the first step nothing is known of the order."""
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
    """In a pass that fails no host waits for a gather: nobody reads what it brings."""

    failing = False

    def _start_gather(self, out: Tensor, shard: Tensor) -> Handle:
        if not Blind.failing:
            return super()._start_gather(out, shard)
        self.later.append(NativeGroup._start_gather(self, torch.empty_like(out), shard).wait)
        out.zero_()
        return self._queue("gather", None)


def fails_apart(in_time: bool) -> tuple[Program, dict[str, Tensor]]:
    """In step 1 rank 0 fails in backward two layers before rank 1, which has gathered and reduced these."""
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


def test_ranks_that_fail_apart_close_no_cycle_when_they_drop_the_pass() -> None:
    check([(state, program) for program, state in run_ranks(2, fails_apart, True)], 3, False)
    assert stuck([program for program, _ in run_ranks(2, fails_apart, False)]), "the test cannot fail"


@pytest.mark.parametrize("stage", [*full(2), 3])
def test_groups_of_the_backend_train_on_branches_that_differ(stage: int) -> None:
    """Over gloo it is the host that waits, where a GPU's stream would."""
    found = run_ranks(3, on_the_backend, zero(stage).but(same_order=False), WAITS_STEPS)
    expected = plain(3, WAITS_STEPS, True)
    for rank, state in enumerate(found):
        assert_close(state, expected, 1e-9, f"rank {rank}")


def on_the_backend(plan: Plan, steps: int) -> dict[str, Tensor]:
    with quick_patience():
        return train_on(NativeGroup, plan, steps, True)[0]


@pytest.mark.parametrize(
    ("prefetch", "same_order"), [(0, None), *full((1, False), (2, None), (0, False), (1, None), (2, False))]
)
def test_reductions_begin_while_backward_runs(same_order: bool | None, prefetch: int) -> None:
    """Where all do the same, a buffer is free again when the layer after the next one needs it."""
    ranks = run_ranks(2, count_begun, zero(3).but(same_order=same_order, prefetch=prefetch), 4)
    for begun, copied in ranks:
        assert begun == [LAYERS] * 4, "all before their end is agreed on"
        assert copied == [0] * 4, "gradients had no buffer"


def count_begun(plan: Plan, steps: int) -> tuple[list[int], list[int]]:
    """For each pass, how many reductions had begun when backward ended, and how many gradients had no buffer."""
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
