"""DeepSpeed's configuration objects, monitors and flops profiler, in one process."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.deepspeed.config_object import (
    DeepSpeedConfig,
    DeepSpeedMonitorConfig,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    ZeroStageEnum,
)
from shardwise.deepspeed.flops import FlopsProfiler, get_model_profile, number_to_string, params_to_string
from shardwise.deepspeed.monitors import CsvMonitor, MonitorMaster, get_monitor_config

TREE: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "fp16": {"enabled": True, "loss_scale_window": 7},
    "zero_optimization": {"stage": 3, "max_live_parameters": 9, "offload_param": {"device": "cpu"}},
    "checkpoint": {"tag_validation": "fail"},
}


def test_a_configuration_by_attributes() -> None:
    config = DeepSpeedConfig(TREE)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (12, 4)
    assert (config.gradient_accumulation_steps, config.world_size) == (3, 1)
    zero = config.zero_config
    assert zero.stage == config.zero_optimization_stage == ZeroStageEnum.weights and config.zero_enabled
    assert zero.max_live_parameters == zero.stage3_max_live_parameters == 9 and zero.reduce_bucket_size == 500_000_000
    assert zero.offload_param.device is OffloadDeviceEnum.cpu and zero.offload_param.device == "cpu"
    assert zero.offload_optimizer is None and zero.zenflow is None and "stage=3" in repr(zero)
    assert isinstance(zero.offload_param, DeepSpeedZeroOffloadParamConfig)
    old = DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer
    assert isinstance(old, DeepSpeedZeroOffloadOptimizerConfig) and old.device == "cpu" and not old.pipeline
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    assert DeepSpeedZeroOffloadParamConfig(buffer_count=7).buffer_count == 7
    assert config.float16_config.loss_scale_window == 7 and not config.bfloat16_config.enabled
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == ("AdamW", {"lr": 1e-3}, None)
    assert config.checkpoint_tag_validation_fail and config.checkpoint_tag_validation_enabled
    assert config.aio_config["queue_depth"] == 8 and config.gradient_clipping == 1.0 and config.steps_per_print is None
    assert not config.monitor_config.enabled and config.monitor_config.wandb.project == "deepspeed"
    with pytest.raises(AttributeError, match="'stagge' is no key of 'zero_optimization'"):
        _ = zero.stagge
    with pytest.raises(AttributeError, match="has no attribute 'train_batch'"):
        _ = config.train_batch
    with pytest.raises(ValueError, match="give at least one of them"):
        DeepSpeedConfig({})
    with pytest.raises(NotImplementedError, match="mesh_device"):
        DeepSpeedConfig(TREE, mesh_device=object())

    class Eight:
        def get_data_parallel_world_size(self) -> int:
            return 2

    assert DeepSpeedConfig(TREE, mpu=Eight()).train_micro_batch_size_per_gpu == 2
    assert DeepSpeedZeroConfig(stage=2, reduce_bucket_size="5e3").reduce_bucket_size == 5000
    with pytest.raises(ValueError, match="did you mean 'stage'"):
        DeepSpeedZeroConfig(stagge=2)


EVENTS = [("Train/Samples/train loss", 0.5, 8), ("Train/Samples/lr", 1e-3, 8)]


def test_csv_files_have_a_line_for_each_number(tmp_path: Path) -> None:
    config = get_monitor_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    master = MonitorMaster(config)
    assert master.enabled and master.tb_monitor is master.wandb_monitor is master.comet_monitor is None
    master.write_events(EVENTS)
    master.write_events([("Train/Samples/lr", 5e-4, 16)])
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text() == "step,lr\n8,0.001\n16,0.0005\n"
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text() == "step,train loss\n8,0.5\n"
    off = MonitorMaster(DeepSpeedMonitorConfig())
    off.write_events(EVENTS)
    CsvMonitor(DeepSpeedMonitorConfig(csv_monitor={"output_path": str(tmp_path / "other")}).csv_monitor)
    assert not off.enabled and [path.name for path in tmp_path.iterdir()] == ["job"]


class Calls(types.ModuleType):
    """Stands for a package: every function of it notes its calls."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        super().__init__(name)
        self.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None)
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Calls:
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_packages_are_used_where_they_are_and_named_where_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = {
        "tensorboard": ({"output_path": str(tmp_path), "job_name": "t"}, "tensorboard"),
        "wandb": ({"group": "g", "team": "e", "project": "p"}, "wandb"),
        "comet": ({"samples_log_interval": 10, "project": "p", "experiment_name": "n"}, "comet_ml"),
    }
    for block, (keys, package) in blocks.items():
        config = get_monitor_config({block: {"enabled": True, **keys}})
        monkeypatch.setitem(sys.modules, package, None)
        with monkeypatch.context() as without:
            without.setattr("importlib.util.find_spec", lambda name: None)
            with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
                MonitorMaster(config)
        calls: list[Any] = []
        monkeypatch.setitem(sys.modules, package, Calls(package, calls))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Calls("torch.utils.tensorboard", calls))
        master = MonitorMaster(config)
        master.write_events(EVENTS)
        master.write_events([("Train/Samples/lr", 5e-4, 16)])
        master.write_events([("Train/Samples/lr", 2e-4, 18)])
        assert calls == EXPECTED[block](str(tmp_path / "t"))
    assert (tmp_path / "t").is_dir()


def _each(name: str, make: Any) -> list[Any]:
    points = [*EVENTS, ("Train/Samples/lr", 5e-4, 16), ("Train/Samples/lr", 2e-4, 18)]
    return [(name, *make(*point)) for point in points]


EXPECTED: dict[str, Any] = {
    "tensorboard": lambda path: [
        ("SummaryWriter", (), {"log_dir": path}),
        *_each("add_scalar", lambda *event: (event, {}))[:2],
        ("flush", (), {}),
        ("add_scalar", ("Train/Samples/lr", 5e-4, 16), {}),
        ("flush", (), {}),
        ("add_scalar", ("Train/Samples/lr", 2e-4, 18), {}),
        ("flush", (), {}),
    ],
    "wandb": lambda _: [
        ("init", (), {"project": "p", "group": "g", "entity": "e"}),
        *_each("log", lambda name, value, step: (({name: value},), {"step": step, "commit": None})),
    ],
    # At most one number in ten samples.
    "comet": lambda _: [
        (
            "start",
            (),
            dict.fromkeys(("api_key", "workspace", "experiment_key", "mode", "online")) | {"project": "p"},
        ),
        ("set_name", ("n",), {}),
        *_each("log_metric", lambda name, value, step: ((), {"name": name, "value": value, "step": step}))[:2],
        ("log_metric", (), {"name": "Train/Samples/lr", "value": 2e-4, "step": 18}),
    ],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.outer(self.norm(self.inner(x)))
        return value


def test_products_are_counted_by_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Block(), nn.Linear(2, 3))
    model[1].bias = None
    batch, inner, outer, last = 5, 4 * 8, 8 * 2, 2 * 3
    macs, params = batch * (inner + outer + last), 32 + 8 + 16 + 16 + 6
    found = get_model_profile(model, (batch, 4), print_profile=False, as_string=False)
    assert found == (2 * macs, macs, params) and model.training
    assert get_model_profile(model, args=[torch.ones(batch, 4)], print_profile=False)[2] == str(params)
    assert capsys.readouterr().out == ""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    x = torch.ones(batch, 4, requires_grad=True)
    model(x).sum().backward()  # a backward pass is not counted
    model(x)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert profiler.get_total_macs() == 2 * macs and profiler.get_total_duration() > 0
    profiler.stop_profile()
    model(x)
    assert profiler.get_total_flops() == 4 * macs and profiler.get_total_params(as_string=True) == str(params)
    profiler.print_model_profile(4, top_modules=1, output_file=str(tmp_path / "made" / "here.txt"))
    text = (tmp_path / "made" / "here.txt").read_text()
    assert "at step 4" in text and f"(inner): Linear  (in_features=4, out_features=8, bias=True)  {inner + 8}" in text
    assert f"1: macs     Block {2 * batch * (inner + outer)} MACs" in text
    assert f"{2 * batch * inner} MACs = {100 * inner / (inner + outer + last):.4g}%" in text
    profiler.end_profile()
    profiler.print_model_profile()
    assert capsys.readouterr().out == "" and profiler.macs == 2 * macs
    assert not model._forward_hooks and not model[0].inner._forward_pre_hooks
    profiler.start_profile(ignore_list=[Block])
    model(x)
    profiler.print_model_profile(detailed=False, module_depth=0)
    assert "Block" not in capsys.readouterr().out
    profiler.end_profile()
    for wrong, message in (({"mode": "train", "args": [x]}, "mode='train'"), ({}, "give one of them")):
        with pytest.raises(ValueError, match=message):
            get_model_profile(model, **wrong)


def test_numbers_in_words() -> None:
    assert [number_to_string(n) for n in (0, 5, 1234, 2.5e9, 3e-5)] == ["0 ", "5 ", "1.23 K", "2.5 G", "30 u"]
    assert params_to_string(1234567, units="K", precision=1) == "1234.6 K"
