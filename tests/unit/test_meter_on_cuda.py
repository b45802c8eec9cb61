"""What the engine's meter asks of CUDA's allocator, against a fake of it."""

from __future__ import annotations

import pytest
import torch
from cuda_setup import FakeCuda

from shardwise.engine.meter import MemoryMeter
from shardwise.memory.ledger import REST, Ledger

CUDA = torch.device("cuda")


def test_what_is_only_foreseen_is_not_taken_off_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rest of the first step, before there is optimizer state, would seem smaller by that."""
    cuda, made = FakeCuda(monkeypatch), [0]
    ledger = Ledger(CUDA, 10_000)
    ledger.watch("parameter shards", lambda: 1000)
    ledger.watch("masters and optimizer state", lambda: 3000)
    meter = MemoryMeter(ledger, CUDA, None, lambda: 3000 - made[0])
    cuda.allocate(1000)
    with meter.measuring():
        cuda.allocate(500)
        assert ledger.held()[REST] == 500 and ledger.free_bytes() == 5500
        cuda.allocate(3000)
        made[0] = 3000
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
