"""What goes wrong while the Booster saves on two ranks, at once or in the background: every rank is told, and what was
saved before is still there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.core.checkpoint import CheckpointError
from shardwise.core.checkpoint.formats import huggingface
from shardwise.testing import run_ranks
from tests.support.booster_setup import PLUGINS, Run, assert_same, load, plain, save
from tests.support.sets import full

RANKS = 2


# -- asynchronous


def _async(folder: str, name: str) -> None:
    run = Run(PLUGINS[name]())
    run.steps(0, 2)
    go, path = threading.Event(), Path(folder)
    write = huggingface.write_safetensors_stream

    def held(*place: Any) -> int:
        assert go.wait(60)
        return write(*place)

    huggingface.write_safetensors_stream = held
    try:
        save(run, path, use_async=True)
        run.steps(2, 4)
        assert run.booster._files.saving and not (path / "model").exists(), "training went on"
        threading.Timer(0.2, go.set).start()
        run.booster.save_model(run.model, path / "later", shard=True, use_async=True)
        assert dist.get_rank() != 0 or (path / "model").exists(), "a save that still runs is waited for"
        run.booster.wait()
    finally:
        huggingface.write_safetensors_stream = write
    dist.barrier()
    again = Run(PLUGINS[name](), seed=99)
    load(again, path)
    assert_same(again.model.state_dict(), plain(2))
    again.steps(2, 4)
    assert_same(again.model.state_dict(), plain(4))
    again.booster.load_model(again.model, path / "later")
    assert_same(again.model.state_dict(), plain(4))


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.campaign), *full("fsdp"), "gemini"])
def test_asynchronous_saves(name: str, tmp_path: Path) -> None:
    run_ranks(RANKS, _async, str(tmp_path), name)


def _async_failure(folder: str) -> str:
    run = Run(PLUGINS["gemini"]())
    (Path(folder) / "file").touch()
    run.booster.save_model(run.model, Path(folder) / "file" / "m.safetensors", use_async=True)
    with pytest.raises(CheckpointError) as error:
        run.booster.save_model(run.model, Path(folder) / "m.safetensors", use_async=True)
    run.booster.save_model(run.model, Path(folder) / "m.safetensors", use_async=True)
    run.steps(0, 1)
    run.booster.wait()
    return str(error.value)


def test_a_failed_asynchronous_save_is_told_to_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(RANKS, _async_failure, str(tmp_path)):
        assert "asynchronous save failed" in message and "rank 0 could not save the model" in message
    assert (tmp_path / "m.safetensors").is_file()
