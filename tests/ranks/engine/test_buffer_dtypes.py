"""Buffers in a 16-bit model: which dtype they have, and what becomes of counters in them."""

from __future__ import annotations

import torch
from torch import nn

import shardwise
from shardwise.testing import run_ranks


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("narrow", torch.zeros(()))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64))
        self.register_buffer("whole", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer.add_(1)
        return self.layer(x)


def counted(stage: int) -> list[tuple[str, float]]:
    plan = shardwise.session.Settings(stage=stage, precision="bf16").plan().but(buffer_dtype=torch.bfloat16)
    session = shardwise.shard(Counting(), plan=plan)
    with torch.no_grad():
        for _ in range(300):
            session.module(torch.ones(1, 2))
    state = session.module.state_dict()
    session.close()
    return [(str(state[name].dtype), float(state[name])) for name in ("narrow", "wide", "whole")]


def test_a_buffer_dtype_leaves_fp64_and_integer_buffers() -> None:
    expected = [("torch.bfloat16", 256.0), ("torch.float64", 300.0), ("torch.int32", 300.0)]
    assert run_ranks(2, counted, 3) == [expected] * 2
