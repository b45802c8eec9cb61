"""Profiler labels of gathers, reductions, updates and copies to the host, and of waits for a disk."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardwise.core.grads import chunk_grads
from shardwise.plan import ByNumel, Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import sharded
from tests.support.tier_setup import with_tiers

OF_BLOCKS = {f"shardwise::{kind} ({name})" for kind in ("gather", "reduce") for name in ("0", "1")}


AT_ONCE: dict[str, Any] = {
    "side_stream": lambda _device: "a stream",
    "behind_current": lambda *_: contextlib.nullcontext(),
    "copy_ahead": lambda memory, out: memory.copy_(out),
    "record_event": lambda _device: SimpleNamespace(synchronize=lambda: None),
    "recorded": lambda *_: None,
}
"""Patches that make copies to the host synchronous."""


def labels(plan: Plan, to_host: bool = False) -> set[str]:
    """Return the labels of the second step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with contextlib.ExitStack() as stack:
        if to_host:
            stack.enter_context(mock.patch.multiple(chunk_grads, **AT_ONCE))
        session = stack.enter_context(sharded(model, optimizer, plan))

        def step() -> None:
            session.backward(session.module(torch.ones(2, 4)).square().mean())
            session.optimizer.step()
            session.optimizer.zero_grad()

        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        return {event.key for event in profile.key_averages() if event.key.startswith("shardwise::")}


def test_labels_name_modules() -> None:
    for found in run_ranks(2, labels, zero(3)):
        assert found > OF_BLOCKS, found
        assert any(each.startswith("shardwise::update (0") for each in found), found
    by_size = {"shardwise::reduce (0.weight to 1.bias)", "shardwise::update (0.weight to 1.bias)"}
    assert run_ranks(1, labels, zero(2).but(packing=ByNumel(chunk_numel=1000))) == [by_size]


def test_labels_of_transfers(tmp_path: Path) -> None:
    assert labels(with_tiers(zero(3), "s_disk", str(tmp_path))) > {"shardwise::disk (read)", "shardwise::disk (write)"}
    for found in run_ranks(2, labels, with_tiers(zero(3), "s_host", "no disk is used"), True):
        assert found > {"shardwise::offload (0)", "shardwise::offload (1)"}, found
