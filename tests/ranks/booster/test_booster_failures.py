"""What goes wrong while the Booster saves on two ranks, at once or in the background: every rank is told, and what was
saved before is still there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.core.checkpoint import CheckpointError, atomic, portable
from shardwise.core.checkpoint.atomic import FileSystem
from shardwise.core.checkpoint.formats import huggingface
from shardwise.core.engine.fragments import FragmentReader
from shardwise.testing import run_ranks
from tests.support.booster_setup import PLUGINS, TINY, Run, assert_same, load, plain, save
from tests.support.sets import full

RANKS = 2


def _failing_shard(folder: str, name: str) -> str:
    run = Run(PLUGINS[name]())
    path = Path(folder) / "model"
    run.booster.save_model(run.model, path, shard=True, size_per_shard=TINY)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    run.steps(0, 1)
    calls = []

    def failing(file: Path, *rest: Any) -> int:
        calls.append(file)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", str(file))
        return write(file, *rest)

    write, huggingface.write_safetensors_stream = huggingface.write_safetensors_stream, failing
    try:
        with pytest.raises(CheckpointError) as error:
            run.booster.save_model(run.model, path, shard=True, size_per_shard=TINY)
    finally:
        huggingface.write_safetensors_stream = write
    dist.barrier()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert os.listdir(folder) == ["model"]
    run.steps(1, 2)
    run.booster.save_model(run.model, path, shard=True, size_per_shard=TINY)
    assert_same(run.booster.load_model(run.model, path).state_dict(), plain(2))
    return str(error.value)


@pytest.mark.parametrize("name", [pytest.param("fsdp", marks=pytest.mark.campaign), "gemini"])
def test_a_failed_save_leaves_the_earlier_shards(name: str, tmp_path: Path) -> None:
    for message in run_ranks(RANKS, _failing_shard, str(tmp_path), name):
        assert "rank 0 could not save the model" in message and "ENOSPC" in message


def _failing_peer(folder: str) -> list[str]:
    run = Run(PLUGINS["gemini"]())
    path = Path(folder) / "model.safetensors"
    messages = []
    read, offer = FragmentReader.read, portable.LocalTensors.of_model.__func__  # type: ignore[attr-defined]

    def failing(self: Any, *place: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error", "a disk")
        return read(self, *place)

    def refusing(cls: Any, run: Any) -> Any:
        if dist.get_rank() == 1:
            raise TypeError("something odd")
        return offer(cls, run)

    for owner, attribute, broken in (
        (FragmentReader, "read", failing),
        (portable.LocalTensors, "of_model", classmethod(refusing)),
    ):
        kept = vars(owner)[attribute]
        setattr(owner, attribute, broken)
        try:
            with pytest.raises(CheckpointError) as error:
                run.booster.save_model(run.model, path)
            messages.append(str(error.value))
            with pytest.raises(CheckpointError):
                run.booster.save_model(run.model, path, use_async=True)
                run.booster.wait()
        finally:
            setattr(owner, attribute, kept)
    assert not path.exists()
    run.steps(0, 1)
    run.booster.save_model(run.model, path)
    return messages


def test_a_failure_of_another_rank_reaches_every_rank(tmp_path: Path) -> None:
    for reading, offering in run_ranks(RANKS, _failing_peer, str(tmp_path)):
        assert "rank 1 could not" in reading and "EIO" in reading
        assert "rank 1 could not save the model" in offering and "something odd" in offering


# -- asynchronous


def _beside(folder: str) -> None:
    """A model and an optimizer are saved into the directory in which a checkpoint is being written: files that it makes
    between the copy of what is there and the exchange would be lost."""
    run = Run(PLUGINS["gemini"]())
    run.steps(0, 1)
    create, take_along = FileSystem.create, atomic.take_along

    def later(self: FileSystem, path: str) -> int:
        time.sleep(0.02)
        return create(self, path)

    def slow(*given: Any) -> None:
        take_along(*given)
        time.sleep(0.1)

    with mock.patch.object(FileSystem, "create", later), mock.patch.object(atomic, "take_along", slow):
        for tag, write in (("a", run.booster.save_model), ("b", run.booster.save_optimizer)):
            run.booster.save_checkpoint(folder, run.model, run.optimizer, tag=tag, use_async=True)
            write(run.model if tag == "a" else run.optimizer, folder, shard=True)
    run.booster.wait()
    dist.barrier()
    for tag in ("a", "b"):
        assert run.booster.load_checkpoint(folder, run.model, run.optimizer, tag=tag) is not None


def test_a_model_saved_beside_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    run_ranks(RANKS, _beside, str(tmp_path / "runs"))


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
