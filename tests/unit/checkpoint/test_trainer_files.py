"""Tests of reading directories that Hugging Face's Trainer, accelerate, FSDP and DeepSpeed write, with every file in
them.
"""

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from shardwise.core.base import tree
from shardwise.core.checkpoint import CheckpointError, read_lr_scheduler
from shardwise.core.checkpoint.formats import RefusedPickle, detect_format, open_checkpoint
from shardwise.core.checkpoint.source import CheckpointDamage, StateTensors
from tests.support.formats_setup import tensor
from tests.support.on_ranks import raises


def stepped() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def generators() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}


def trainers(path: Path, ranks: int = 1) -> Path:
    """Write a checkpoint as Trainer does."""
    model, optimizer = stepped()
    path.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), str(path / "model.safetensors"))
    beside(path, ranks)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return path


def beside(path: Path, ranks: int = 1) -> None:
    _, optimizer = stepped()
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 7).state_dict(), path / "scheduler.pt")
    for rank in range(ranks):
        torch.save(generators(), path / (f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"))
    torch.save({"scale": 128.0, "growth_factor": 2.0, "_growth_tracker": 5}, path / "scaler.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 9, "log_history": [{"loss": float("nan")}]}))


def test_all_parts_of_a_trainer_checkpoint_are_read(tmp_path: Path) -> None:
    path = trainers(tmp_path / "checkpoint-9", ranks=2)
    state = open_checkpoint(path).state()
    assert detect_format(path) == "trainer"
    assert state["step"] == 9 == state["updates"] and state["other"]["trainer_state"] == {"global_step": 9}
    assert state["scaler"] == {"scale": 128.0, "overflows": 0.0, "good_steps": 5.0}
    assert len(state["rng"]) == 2
    source = open_checkpoint(path)
    found = tree.decode(state["rng"][1], StateTensors(source))
    kept = generators()
    assert found["python"]["words"].tolist() == list(kept["python"][1])
    assert np.array_equal(found["numpy"]["keys"].numpy(), kept["numpy"][1])
    assert found["numpy"]["position"] == kept["numpy"][2]
    assert read_lr_scheduler(path).state["step_size"] == 7 == read_lr_scheduler(tmp_path).state["step_size"]


def test_latest_checkpoint_has_the_highest_number(tmp_path: Path) -> None:
    for number in (9, 10, 2):
        trainers(tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-11.txt").write_text("no directory")
    (tmp_path / "training_args.bin").write_bytes(b"objects of Python's")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 10}')
    assert open_checkpoint(tmp_path).state()["step"] == 10
    save_file({"weight": torch.ones(2)}, str(tmp_path / "model.safetensors"))
    assert detect_format(tmp_path) == "huggingface", "the model that the training ended with"


@pytest.mark.parametrize("kind", ["folders", "whole"])
def test_fsdp_checkpoints_of_accelerate(tmp_path: Path, kind: str) -> None:
    model, optimizer = stepped()
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    if kind == "whole":
        torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
        torch.save(moments, tmp_path / "optimizer.bin")
    else:
        save({"model": weights}, storage_writer=FileSystemWriter(tmp_path / "pytorch_model_fsdp_0"), no_dist=True)
        save({"optimizer": moments}, storage_writer=FileSystemWriter(tmp_path / "optimizer_0"), no_dist=True)
    beside(tmp_path)
    source = open_checkpoint(tmp_path)
    assert torch.equal(tensor(source, "model/0.weight"), model[0].weight)  # type: ignore[index]
    names = dict(model.named_parameters())
    for name, parameter in names.items():
        assert torch.equal(tensor(source, f"optimizer/0/{name}/exp_avg"), optimizer.state[parameter]["exp_avg"])
    (record,) = source.state()["optimizers"]
    assert [set(group["params"]) for group in record["groups"]] == [set(names)]
    assert source.state()["step"] == 9


class Hostile:
    def __reduce__(self) -> Any:
        return os.putenv, ("SHARDWISE_RAN", "1")


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scaler.pt"])
def test_hostile_pickles_are_refused(tmp_path: Path, name: str) -> None:
    path = trainers(tmp_path / "checkpoint-1")
    torch.save({"python": Hostile(), "state": Hostile()}, path / name)
    raises(RefusedPickle, name, lambda: open_checkpoint(path))
    (path / name).write_bytes(pickle.dumps(Hostile()))
    raises(CheckpointError, name, lambda: open_checkpoint(path))


def test_damaged_states(tmp_path: Path) -> None:
    """Damaged states of random generators and of the Trainer are found when the checkpoint is opened."""
    path = trainers(tmp_path / "checkpoint-1")
    for key, value in (
        ("python", (3, (1, 2), None)),
        ("python", None),
        ("numpy", ("MT19937", np.zeros(3, dtype=np.uint32), 0, 0, 0.0)),
        ("numpy", ("MT19937", np.zeros(624, dtype=np.float64), 0, 0, 0.0)),
        ("cpu", torch.zeros(3, dtype=torch.uint8)),
        ("cpu", torch.zeros(3)),
    ):
        torch.save({**generators(), key: value}, path / "rng_state.pth")
        raises(CheckpointDamage, r"rng_state\.pth", open_checkpoint, path)
    torch.save(generators(), path / "rng_state.pth")
    for text in ("{", "[]", '{"global_step": "many"}', '{"global_step": -1}'):
        (path / "trainer_state.json").write_text(text)
        raises(CheckpointError, r"trainer_state\.json", open_checkpoint, path)
