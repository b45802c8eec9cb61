"""What the engine's meter asks of CUDA's allocator, against a fake of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from cuda_setup import FakeCuda
from torch import nn

from shardwise.core.memory.ledger import REST, DeviceMemoryError, Ledger
from shardwise.core.memory.trace.tracker import AllocatorTracker
from shardwise.core.shards import meter as meters
from shardwise.core.shards.meter import MemoryMeter
from shardwise.plan import zero
from shardwise.session import Session, build

CUDA = torch.device("cuda")


def test_what_is_only_foreseen_is_not_taken_off_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rest of the first step, before there is optimizer state, would seem smaller by that."""
    cuda, made = FakeCuda(monkeypatch), [0]
    ledger = Ledger(CUDA, 10_000)
    ledger.account("parameter shards", lambda: 1000)
    ledger.account("masters and optimizer state", lambda: 3000)
    meter = MemoryMeter(ledger, CUDA, None, lambda: 3000 - made[0])
    cuda.allocate(1000)
    with meter.measuring():
        cuda.allocate(500)
        ledger.expire()
        assert ledger.held()[REST] == 500 and ledger.free_bytes() == 5500
        cuda.allocate(3000)
        made[0] = 3000
        ledger.expire()
        assert ledger.held()[REST] == 500
    assert ledger.peak_bytes == 4500


def test_the_peak_is_left_alone_once_there_is_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's as well; without a recorder there is nothing to be measured."""
    cuda = FakeCuda(monkeypatch)
    meter = MemoryMeter(Ledger(CUDA, 10_000), CUDA, None, lambda: 0)
    before = cuda.resets
    for _ in range(3):
        meter.enter()
        cuda.allocate(700)
        meter.forward_ended()
        meter.leave()
        cuda.allocate(-700)
    assert cuda.resets == before and cuda.peak == 700


# ---- how often the allocator is asked

LAYERS, WIDTH, STEPS = 12, 8, 4
CAPACITY = 1 << 20


class Block(nn.Module):
    """A unit that backward reads many times: every linear map's weight, and the norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for each in self.maps:
            x = torch.tanh(each(x))
        return x


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The allocator of a GPU that holds what the accounts say and what the test adds, under an engine on the CPU."""
    found = FakeCuda(monkeypatch)

    def make(device: torch.device, model_bytes: Callable[[], int]) -> AllocatorTracker:
        found.model = model_bytes
        return AllocatorTracker(device, model_bytes)

    monkeypatch.setattr(meters, "make_tracker", make)
    return found


@pytest.fixture
def session(cuda: FakeCuda) -> Iterator[Session]:
    """ZeRO-3 with one rank and all parameters on the host, so that every unit is gathered, one ahead."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    plan = zero(3)
    tiers = replace(plan.tiers, param_host_fraction=1.0, device_capacity_bytes=CAPACITY)
    made = build(model, torch.optim.SGD(model.parameters(), lr=0.1), plan.but(tiers=tiers), device=torch.device("cpu"))
    yield made
    made.close()
    made.mesh.close()


def step(session: Session, between: Callable[[], None] = lambda: None) -> None:
    loss = session.module(torch.ones(2, WIDTH)).square().mean()
    between()
    session.backward(loss)
    session.optimizer.step()
    session.optimizer.zero_grad()


def test_the_allocator_is_asked_once_a_gather(cuda: FakeCuda, session: Session) -> None:
    """Once for each unit in forward and in backward, and at both ends of the passes; not at every read of a weight."""
    counts = []
    for _ in range(STEPS):
        before = cuda.queries
        step(session)
        counts.append(cuda.queries - before)
    assert session.engine.pool.moved_bytes > 0, "something was gathered"
    assert 2 * LAYERS <= counts[-1] <= 2 * LAYERS + 6, counts


def test_what_grows_between_two_gathers_makes_room_or_is_an_error(cuda: FakeCuda, session: Session) -> None:
    for _ in range(STEPS):
        step(session)
    session.engine.pool.drop_idle()
    block = session.module.unwrap()[LAYERS // 2]
    grown = block.register_forward_hook(lambda *_: cuda.allocate(CAPACITY))
    with pytest.raises(DeviceMemoryError, match="activations and the rest: 1 MiB"):
        step(session)
    grown.remove()
    cuda.allocate(-CAPACITY)
    session.module.zero_grad()
    step(session)


def test_a_moment_above_the_capacity_that_no_gather_saw_is_seen(cuda: FakeCuda, session: Session) -> None:
    """It came and went while the host was elsewhere; the allocator's own peak tells."""
    for _ in range(STEPS):
        step(session)
    resets = cuda.resets

    def burst(*_: object) -> None:
        cuda.allocate(CAPACITY)
        cuda.allocate(-CAPACITY)

    block = session.module.unwrap()[LAYERS // 2]
    hook = block.register_forward_hook(burst)
    with pytest.raises(DeviceMemoryError, match="in the forward pass activations and the rest took up to"):
        step(session)
    hook.remove()
    assert cuda.resets == resets
    session.module.zero_grad()
    step(session)  # what was before this pass is not held against it
    assert cuda.resets > resets
    step(session, between=burst)  # between the passes it is the program's own


def test_memory_that_waits_for_a_stream_counts(cuda: FakeCuda, session: Session) -> None:
    for _ in range(STEPS):
        step(session)
    cuda.allocate(CAPACITY)
    cuda.drop_recorded(CAPACITY)
    with pytest.raises(DeviceMemoryError):
        step(session)
