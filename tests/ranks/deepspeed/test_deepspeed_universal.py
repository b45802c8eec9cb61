"""Universal checkpoints that DeepSpeed made are taken over by an engine, at another stage; none is written here."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shardwise.deepspeed as deepspeed
from shardwise.compat import UnsupportedName
from shardwise.testing import run_ranks
from tests.support.ds_setup import Recorded, close, start
from tests.support.sets import full

RANKS = 2


def theirs(root: str, config: dict[str, Any]) -> tuple[dict[str, Tensor], list[Any], list[Any]]:
    model = Recorded()
    sizes = [[p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == big] for big in (True, False)]
    optimizer = torch.optim.AdamW([{"params": own} for own in sizes], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine = start(model, config, optimizer=optimizer, lr_scheduler=schedule)
    path, client = engine.load_checkpoint(root)
    assert path == f"{root}/global_step3_universal" and client == {"epoch": 4}
    moments = [state["exp_avg"].float().abs().sum() > 0 for state in engine.optimizer.state_dict()["state"].values()]
    counted = [engine.global_steps, engine.global_samples, engine.skipped_steps, schedule.last_epoch]
    counted += [engine.optimizer.loss_scale, engine.optimizer.param_groups[0]["lr"]]
    return close(engine), counted, moments


HALF = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
THEIRS: list[tuple[str, int, dict[str, Any], float]] = [
    ("zero2-2ranks-fp16", 3, HALF, 512.0),
    ("zero1-2ranks-bf16", 3, {"bf16": {"enabled": True}}, 1.0),
    ("zero3-2ranks-fp16", 1, HALF, 512.0),
]


@pytest.mark.parametrize(("case", "stage", "precision", "scale"), [THEIRS[0], *full(*THEIRS[1:])])
def test_one_that_deepspeed_made_is_taken_over(
    case: str, stage: int, precision: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    with tarfile.open(Path(__file__).parents[2] / "data" / "deepspeed_universal.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "universal" / case
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": True},
        **precision,
    }
    state, counted, moments = run_ranks(RANKS, theirs, str(root), config)[0]
    assert counted == [3, 12, 0, 3, scale, 1e-3], case
    assert moments == [True] * 5
    truth = load_file(root / "truth.safetensors")
    expected = {n.removeprefix("model/"): v for n, v in truth.items() if n.startswith("model/")}
    assert len(expected) == 8
    assert all(torch.equal(state[name].float(), value.float()) for name, value in expected.items()), case


@pytest.mark.parametrize("name", ["main", "parse_arguments"])
def test_none_is_written_and_the_names_say_so(name: str) -> None:
    with pytest.raises(UnsupportedName, match=rf"{name}: checkpoints here are read at any stage"):
        getattr(deepspeed.checkpoint.ds_to_universal, name)()
    deepspeed.checkpoint.enable_universal_checkpoint([])
