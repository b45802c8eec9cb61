"""Masters and optimizer state that wait in host memory between steps, on two ranks, against runs that do not move."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.config_object import OffloadStateTypeEnum
from shardwise.testing import assert_close, run_ranks

RANKS, STEPS = 2, 4
CASES = [(0, {}), (2, {"bf16": {"enabled": True}}), (3, {}), (3, {"fp16": {"enabled": True, "loss_scale": 8.0}})]


def trained(stage: int, more: dict[str, Any], moving: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights and the state after steps, between which everything moves and comes back."""
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = deepspeed.initialize(model=model, config=config)[0]
    dtype = next(engine.parameters()).dtype
    for step in range(STEPS):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        engine.backward(engine(x).float().square().mean())
        if moving and step == 1:
            with pytest.raises(RuntimeError, match="has_gradients=True"):
                engine.offload_states()
        engine.step()
        if moving:
            moves(engine, x, step)
    state = engine.optimizer.state_dict()
    weights = engine.state_dict()
    engine.destroy()
    return weights, state


def moves(engine: deepspeed.DeepSpeedEngine, x: torch.Tensor, step: int) -> None:
    session = engine.session
    before, expected = session.memory(), engine(x)
    kinds = [None, [OffloadStateTypeEnum.hp_params], ["optim_states", "contiguous_grad_buffer"], None][step]
    engine.offload_states(include=kinds, pin_memory=step % 2 == 0, non_blocking=True)
    after = session.memory()
    device, host = before.by_tier["device"], after.by_tier["host"]
    moved = [kind for kind in ("masters", "optimizer state") if device.get(kind)]
    # fp32 shards that are updated in place are parameters, and stay.
    assert "optimizer state" in moved and ("masters" in moved) == (engine.bfloat16_enabled() or engine.fp16_enabled())
    for kind in moved:
        assert host[kind] == device[kind] and kind not in after.by_tier["device"]
    assert after.copied_bytes == 0 and before.master_bytes == after.master_bytes
    assert torch.equal(engine(x), expected)  # evaluation goes on
    assert engine.optimizer.state_dict()["state"]  # and so does saving
    for call in (lambda: engine.backward(engine(x).float().sum()), engine.step):
        with pytest.raises(RuntimeError, match="offloaded to host memory"):
            call()
    engine.zero_grad()
    engine.offload_states()  # nothing is left to move
    engine.reload_states()
    engine.reload_states()
    assert session.memory().by_tier["device"].items() >= {kind: device[kind] for kind in moved}.items()
    engine.offload_states(device="none")
    engine.offload_states(include=["lp_grads"])
    assert not session.memory().by_tier.get("host", {}).get("optimizer state")
    for wrong in ({"device": "nvme"}, {"include": ["lp_params"]}):
        with pytest.raises(NotImplementedError, match="offload_param keeps parameters in host memory"):
            engine.offload_states(**wrong)


def every_case() -> list[Any]:
    return [(trained(stage, more, False), trained(stage, more, True)) for stage, more in CASES]


def test_state_that_was_away_is_as_it_was() -> None:
    for results in run_ranks(RANKS, every_case):
        for (stage, more), (stayed, moved) in zip(CASES, results, strict=True):
            assert_close(moved[0], stayed[0], 0.0, f"stage {stage}, {more}")
            for number, state in stayed[1]["state"].items():
                assert_close(moved[1]["state"][number], state, 0.0, f"state {number} of stage {stage}, {more}")
