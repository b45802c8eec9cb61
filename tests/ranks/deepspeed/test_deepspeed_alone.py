"""A DeepSpeed engine's saves, loads and reads on one rank alone, or with directories that differ: each rank is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.comm import PeerError
from tests.support.ds_setup import ds_config, start
from tests.support.on_ranks import on_ranks

Call = Callable[[deepspeed.DeepSpeedEngine, str], object]


def engine_of(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(1)
    return start(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), ds_config(stage))


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


@on_ranks(2)
@pytest.mark.parametrize(("call", "stage"), [(save, 3), (load, 3), (save_16bit, 2), (read, 3)])
def test_a_rank_that_trains_on_and_one_that_is_alone_in_a_call_are_told_which(
    call: Call, stage: int, tmp_path: Path
) -> None:
    """Rank 0 makes the call, rank 1 goes on training."""
    folder = str(tmp_path)
    engine = engine_of(stage)
    train(engine, folder)
    engine.save_checkpoint(folder, tag="before")
    with pytest.raises(PeerError) as told:
        (call if dist.get_rank() == 0 else train)(engine, folder)
    dist.barrier()
    assert CALLS[call] in str(told.value) and "every rank has to make such a call" in str(told.value)


@on_ranks(2)
def test_directories_that_differ_are_named_and_nothing_is_saved(tmp_path: Path) -> None:
    engine, mine = engine_of(3), tmp_path / f"of-{dist.get_rank()}"
    with pytest.raises(CheckpointError, match=r"does not see.* use the same directory on every rank"):
        engine.save_checkpoint(str(mine))
    assert not mine.exists() or not list(mine.iterdir())
    engine.save_checkpoint(str(tmp_path / "all"))
    engine.destroy()
    assert (tmp_path / "all" / "latest").exists()
