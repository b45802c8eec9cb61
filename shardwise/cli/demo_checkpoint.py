"""The demo's checkpoints: a folder a step, made under another name and given its own by one rename when complete.

``step-000300/`` holds ``model.safetensors``, ``optimizer.safetensors``, ``lr_scheduler.json``, ``state.json`` (where
the run is) and ``rank-0.json`` ... (each rank's random state). All of it is for any number of ranks and any plugin.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.booster import Booster
from shardwise.cli.errors import BadInput

__all__ = ["RunState", "Trained", "latest", "read_state", "restore", "save"]

PREFIX = "step-"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run is.

    Attributes:
        step: steps done.
        goal: the step at which this run is complete.
        phase_start: the step at which the learning-rate schedule under way began.
        steps_option: ``--steps`` when ``goal`` was set.
        windows: windows of the text that were used, all ranks together: the position in the data.
        model: the model's sizes.
        data_digest: identifies the text.
        ranks: how many ranks wrote it.
        plugin: which plugin trained.
        seed: of the order of the text.
    """

    step: int
    goal: int
    phase_start: int
    steps_option: int
    windows: int
    model: dict[str, int]
    data_digest: str
    ranks: int
    plugin: str
    seed: int


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds: the boosted objects."""

    booster: Booster
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any


def latest(out: Path) -> Path | None:
    """The newest complete checkpoint in ``out``."""
    found = [path for path in out.glob(f"{PREFIX}*") if (path / "state.json").is_file()]
    return max(found, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)


def read_state(checkpoint: Path) -> RunState:
    """The state in a checkpoint.

    Raises:
        BadInput: it is not one of the demo's.
    """
    try:
        return RunState(**json.loads((checkpoint / "state.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError) as problem:
        raise BadInput(f"--out: {checkpoint} cannot be read ({problem}); remove it, or give another") from problem


def _write_json(path: Path, value: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(out: Path, state: RunState, trained: Trained) -> Path:
    """Write a checkpoint, then remove the older ones. Collective: every rank calls it."""
    rank = dist.get_rank()
    final = out / f"{PREFIX}{state.step:06d}"
    making = out / f".making-{final.name}"
    if rank == 0:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
    dist.barrier()
    trained.booster.save_model(trained.model, making / "model.safetensors", use_safetensors=True)
    trained.booster.save_optimizer(trained.optimizer, making / "optimizer.safetensors")
    trained.booster.save_lr_scheduler(trained.lr_scheduler, making / "lr_scheduler.json")
    _write_json(making / f"rank-{rank}.json", {"cpu_random_state": bytes(torch.get_rng_state().tolist()).hex()})
    dist.barrier()
    if rank == 0:
        _write_json(making / "state.json", asdict(state))
        _sync_folder(making)
        if final.exists():  # this very step was saved before
            shutil.rmtree(final)
        making.rename(final)
        _sync_folder(out)
        for older in [p for p in (*out.glob(f"{PREFIX}*"), *out.glob(f".making-{PREFIX}*")) if p != final]:
            shutil.rmtree(older, ignore_errors=True)
    dist.barrier()
    return final


def restore(checkpoint: Path, trained: Trained) -> None:
    """Load a checkpoint into boosted objects. Collective. A rank that the run did not have keeps its random state."""
    trained.booster.load_model(trained.model, checkpoint / "model.safetensors")
    trained.booster.load_optimizer(trained.optimizer, checkpoint / "optimizer.safetensors")
    trained.booster.load_lr_scheduler(trained.lr_scheduler, checkpoint / "lr_scheduler.json")
    own = checkpoint / f"rank-{dist.get_rank()}.json"
    if own.is_file():
        text = json.loads(own.read_text("utf-8"))["cpu_random_state"]
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))
