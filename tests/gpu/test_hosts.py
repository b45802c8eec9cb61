"""Collectives in two steps over NCCL, between ranks that take each other's GPUs for those of two hosts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpu.on_device import Run, Setting, plain, train
from shardwise.comm import choose
from shardwise.plan import Plan, zero
from shardwise.testing import RankPool, assert_close

RANKS = 4
PLANS = {"zero2": zero(2).but(by_hosts=True), "zero3": zero(3).but(by_hosts=True, prefetch=2)}


def on_two_hosts(setting: Setting) -> Run:
    """Train, on this rank."""
    with mock.patch.object(choose, "host_facts", lambda: {"host": f"host {dist.get_rank() // 2}"}):
        return train(setting)


@pytest.mark.gpus(RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("model", ["mlp", "odd_sizes", "gpt"])
@pytest.mark.parametrize("name", PLANS)
def test_two_hosts(name: str, model: str, dtype: torch.dtype) -> None:
    plan: Plan = PLANS[name]
    setting = Setting(model=model, plan=plan, device_type="cuda", dtype=dtype)
    rtol = 1e-11 if dtype == torch.float64 else 1e-5
    with RankPool(RANKS, backend="cpu:gloo,cuda:nccl") as pool:
        expected = pool.run(plain, setting, RANKS, timeout=240.0)[0]
        for rank, run in enumerate(pool.run(on_two_hosts, setting, timeout=240.0)):
            for step, parameters in enumerate(expected.masters):
                losses = [micro[rank] for micro in expected.losses[step]]
                assert run.losses[step] == pytest.approx(losses, rel=rtol)
                assert_close(run.parameters[step], parameters, rtol, f"parameters of rank {rank}, step {step}")
