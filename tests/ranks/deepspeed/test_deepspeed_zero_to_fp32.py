"""``zero_to_fp32`` beside a running engine: into its own model at stage 3, and on all ranks at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from shardwise.testing import assert_close
from tests.support.ds_setup import ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks

RANKS = 2


def engine_at(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    model.register_buffer("offset", torch.arange(3.0))
    return start(model, ds_config(stage, 4, optimizer=optimizer_block("AdamW", lr=1e-2)))


def train(engine: deepspeed.DeepSpeedEngine, seed: int) -> None:
    torch.manual_seed(seed * RANKS + dist.get_rank())
    engine.backward(engine(torch.randn(4, 5)).square().mean())
    engine.step()


@on_ranks(RANKS)
def test_into_a_model_that_is_sharded(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = engine_at(3)
    train(engine, 0)
    engine.save_checkpoint(folder, "first")
    saved = engine.state_dict()
    train(engine, 1)
    trained = engine.state_dict()
    assert not torch.equal(saved["0.weight"], trained["0.weight"])
    load_state_dict_from_zero_checkpoint(engine.module, folder, "first")
    assert_close(engine.state_dict(), saved, 0.0, "an engine's model takes it over")
    with deepspeed.zero.GatheredParameters(engine.module), pytest.raises(RuntimeError, match="would bypass shards"):
        load_state_dict_from_zero_checkpoint(engine.module, folder, "first")
    engine.destroy()
