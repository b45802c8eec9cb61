"""What the engine's meter asks of CUDA's allocator, against a fake of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from cuda_setup import FakeCuda
from torch import nn

from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.trace.tracker import AllocatorTracker
from shardwise.core.shards import meter as meters
from shardwise.plan import zero
from shardwise.session import Session, build

CUDA = torch.device("cuda")


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
