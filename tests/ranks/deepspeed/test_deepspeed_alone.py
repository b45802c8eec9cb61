"""A DeepSpeed engine's saves, loads and reads on one rank alone, or with directories that differ: each rank is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.comm import PeerError
from shardwise.testing import run_ranks

Call = Callable[[deepspeed.DeepSpeedEngine, str], object]


def engine_of(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), config=config)[0]


def train(engine: deepspeed.DeepSpeedEngine, _: str) -> object:
    engine.backward(engine(torch.ones(1, 3)).square().sum())
    return engine.step()


def save(engine: deepspeed.DeepSpeedEngine, folder: str) -> object:
    return engine.save_checkpoint(folder, tag="alone")


def load(engine: deepspeed.DeepSpeedEngine, folder: str) -> object:
    return engine.load_checkpoint(folder, tag="before")


def save_16bit(engine: deepspeed.DeepSpeedEngine, folder: str) -> object:
    return engine.save_16bit_model(folder, "alone.bin")


def read(engine: deepspeed.DeepSpeedEngine, _: str) -> object:
    return deepspeed.utils.safe_get_full_fp32_param(next(engine.module.parameters()))


CALLS: dict[Call, str] = {
    save: "saving checkpoint 'alone' in ",
    load: "loading checkpoint 'before' of ",
    save_16bit: "saving the model to ",
    read: "reading a parameter",
}


def alone(stage: int, call: Call, folder: str) -> str:
    """Rank 0 makes the call, rank 1 goes on training."""
    engine = engine_of(stage)
    train(engine, folder)
    engine.save_checkpoint(folder, tag="before")
    told = ""
    try:
        (call if dist.get_rank() == 0 else train)(engine, folder)
    except PeerError as error:
        told = str(error)
    dist.barrier()
    return told


@pytest.mark.parametrize(("call", "stage"), [(save, 3), (load, 3), (save_16bit, 2), (read, 3)])
def test_a_rank_that_trains_on_and_one_that_is_alone_in_a_call_are_told_which(
    call: Call, stage: int, tmp_path: Path
) -> None:
    for told in run_ranks(2, alone, stage, call, str(tmp_path)):
        assert CALLS[call] in told and "every rank has to make such a call" in told, told


def apart(folder: str) -> tuple[str, list[str]]:
    engine, mine = engine_of(3), os.path.join(folder, f"of-{dist.get_rank()}")
    said = ""
    try:
        engine.save_checkpoint(mine)
    except CheckpointError as error:
        said = str(error)
    there = os.listdir(mine) if os.path.isdir(mine) else []
    engine.save_checkpoint(os.path.join(folder, "all"))
    engine.destroy()
    return said, there


def test_directories_that_differ_are_named_and_nothing_is_saved(tmp_path: Path) -> None:
    for said, there in run_ranks(2, apart, str(tmp_path)):
        assert "does not see" in said and "use the same directory on every rank" in said, said
        assert there == []
    assert (tmp_path / "all" / "latest").exists()
