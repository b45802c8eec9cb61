"""``ShardwiseTrainer.save_model`` when writing fails: every rank is told, and the model that was there stays."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.on_ranks import on_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from shardwise.core.checkpoint import CheckpointError
from shardwise.core.checkpoint.formats import output
from shardwise.plan import zero
from tests.support.huggingface_setup import RANKS, launched, make, quiet, weights


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def full_disk(trainer: Any, directory: str, **how: Any) -> None:
    """In the place of ``save_pretrained``: one of the files is cut off."""
    type(trainer.model).save_pretrained(trainer.model, directory, **how)
    os.truncate(Path(directory) / "model.safetensors", 100)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")


@on_ranks(RANKS, timeout=120.0)
def test_a_model_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    path = Path(folder)
    said = []
    with launched(), quiet():
        trainer = make(folder, zero(3), eval_strategy="no", max_steps=1)
        trainer.train()
        trainer.save_model()  # beside the checkpoints, where it is saved by default
        state = trainer.session.module.state_dict()
        trainer.session.module.load_state_dict({name: 2 * value for name, value in state.items()})
        before, number = content(path), path.stat().st_ino
        refused = OSError(errno.EIO, os.strerror(errno.EIO), "a directory")
        for owner, name, broken in (
            (trainer.model, "save_pretrained", partial(full_disk, trainer)),
            (output, "sync_path", mock.Mock(side_effect=refused)),
        ):
            with mock.patch.object(owner, name, broken), pytest.raises(CheckpointError) as error:
                trainer.save_model()
            said.append(str(error.value))
            dist.barrier()
            assert content(path) == before
            dist.barrier()
        small = partial(trainer.model.save_pretrained, max_shard_size="2KB")
        with mock.patch.object(trainer.model, "save_pretrained", small):
            for name in ("", "new"):
                trainer.save_model(str(path / name))
        trainer.accelerator.close()
    for name in ("", "new"):
        names = {file.name for file in (path / name).iterdir()}
        assert "model.safetensors" not in names and "model.safetensors.index.json" in names
        assert not any(each.startswith(".") for each in names)
        for key, value in weights(str(path / name)).items():
            assert torch.equal(value, 2 * state[key]), key
    assert path.stat().st_ino == number and (path / "checkpoint-1" / "model.safetensors").is_file()
    full, broken = said
    assert "rank 0 could not save the model to" in full and "ENOSPC" in full
    assert "rank 0 could not save the model to" in broken and "EIO" in broken
