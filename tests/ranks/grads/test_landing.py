"""Offload to the host without waiting: gradients land when they are read, uploads have a stream of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.core.comm import DONE, Buffer, Handle, LocalGroup
from shardwise.core.grads import offload as landing
from shardwise.core.grads.offload import MAX_IN_FLIGHT, _Copy
from shardwise.core.memory.tier import Tier
from shardwise.core.shards import source
from shardwise.core.shards.source import MemorySource
from shardwise.plan import zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import adam, one_mesh, seeded, sharded
from tests.support.stream_setup import LAYERS, Branching, losses_of
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
