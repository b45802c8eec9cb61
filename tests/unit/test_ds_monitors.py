"""DeepSpeed's configuration objects, monitors and count of operations, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.deepspeed import monitors
from shardwise.deepspeed.config import read_config
from shardwise.deepspeed.config_object import DeepSpeedConfig, OffloadDeviceEnum, ZeroStageEnum
from shardwise.deepspeed.flops import get_model_profile
from shardwise.deepspeed.monitors import Monitor

TREE: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "fp16": {"enabled": True, "loss_scale_window": 7},
    "zero_optimization": {"stage": 3, "max_live_parameters": 9, "offload_param": {"device": "cpu"}},
}


def test_a_configuration_by_attributes() -> None:
    config = DeepSpeedConfig(TREE)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (12, 4)
    assert (config.gradient_accumulation_steps, config.world_size) == (3, 1)
    zero = config.zero_config
    assert zero.stage == config.zero_optimization_stage == ZeroStageEnum.weights and config.zero_enabled
    assert zero.max_live_parameters == zero.stage3_max_live_parameters == 9 and zero.reduce_bucket_size == 500_000_000
    assert zero.offload_param.device == OffloadDeviceEnum.cpu and zero.offload_optimizer is None
    assert config.float16_config.loss_scale_window == 7 and not config.bfloat16_config.enabled
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == ("AdamW", {"lr": 1e-3}, None)
    assert config.gradient_clipping == 1.0 and config.steps_per_print is None
    with pytest.raises(AttributeError, match="'stagge' is not a key of 'zero_optimization'"):
        _ = zero.stagge
    with pytest.raises(AttributeError, match="has no attribute 'train_batch'"):
        _ = config.train_batch
    with pytest.raises(ValueError, match="give at least one of them"):
        DeepSpeedConfig({})
    with pytest.raises(NotImplementedError, match="mesh_device"):
        DeepSpeedConfig(TREE, mesh_device=object())


EVENTS = [("Train/Samples/train loss", 0.5, 8), ("Train/Samples/lr", 1e-3, 8)]


def monitor(block: str, **keys: Any) -> Monitor:
    return Monitor(read_config({block: {"enabled": True, **keys}}))


def test_csv_files_have_a_line_for_each_number(tmp_path: Path) -> None:
    made = monitor("csv_monitor", output_path=str(tmp_path), job_name="job")
    assert made.enabled
    made.write_events(EVENTS)
    made.write_events([("Train/Samples/lr", 5e-4, 16)])
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text() == "step,lr\n8,0.001\n16,0.0005\n"
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text() == "step,train loss\n8,0.5\n"
    off = Monitor(read_config({"csv_monitor": {"output_path": str(tmp_path / "other")}}))
    off.write_events(EVENTS)
    assert not off.enabled and [path.name for path in tmp_path.iterdir()] == ["job"]


def test_blocks_of_the_configuration_are_writers_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def noting(*args: Any, **options: Any) -> Any:
        return lambda step, values: written.append((args, options, step, values))

    for name in ("tensorboard", "wandb"):
        monkeypatch.setattr(monitors, name, noting)
        with pytest.raises(ModuleNotFoundError, match=f"{name}.enabled=True needs the package .*pip install {name}"):
            monitor(name)
    monkeypatch.setattr(monitors, "require_package", lambda *_: None)
    monitor("tensorboard", output_path=str(tmp_path), job_name="t").write_events(EVENTS)
    monitor("wandb", group="g", team="e", project="p").write_events(EVENTS)
    values = {name: value for name, value, _ in EVENTS}
    assert written == [
        ((tmp_path / "t",), {}, 8, values),
        ((), {"project": "p", "group": "g", "entity": "e"}, 8, values),
    ]


def test_comet_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="give wandb, tensorboard or csv_monitor"):
        monitor("comet")


def test_products_of_a_call_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
    batch, macs, params = 5, 5 * (4 * 8 + 8 * 2), 32 + 8 + 16 + 16
    assert get_model_profile(model, (batch, 4), print_profile=False, as_string=False) == (2 * macs, macs, params)
    found = get_model_profile(model, args=[torch.ones(batch, 4)], print_profile=False)
    assert found == (f"{2 * macs}", f"{macs}MACs", str(params)) and model.training
    assert capsys.readouterr().out == ""
    get_model_profile(model, (batch, 4), output_file=str(tmp_path / "here.txt"))
    get_model_profile(model, (batch, 4), module_depth=1)
    assert "Sequential.0: 320 operations" in (tmp_path / "here.txt").read_text()
    assert capsys.readouterr().out.startswith("Global: 480 operations\n")
