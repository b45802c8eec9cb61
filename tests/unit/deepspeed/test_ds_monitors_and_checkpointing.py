"""Tests of smaller parts of DeepSpeed's API in one process.

- ``DeepSpeedConfig``, monitors, and ``get_model_profile``.
- ``deepspeed.checkpointing`` gives the same bits as a plain call.
- Each name of DeepSpeed that installed libraries import or read exists here.
"""

import ast
import copy
import importlib
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.deepspeed import checkpointing, monitors
from shardwise.deepspeed.config import read_config
from shardwise.deepspeed.config_object import DeepSpeedConfig, OffloadDeviceEnum, ZeroStageEnum
from shardwise.deepspeed.flops_profiler import get_model_profile
from shardwise.deepspeed.monitors import Monitor
from tests.support.on_ranks import raises
from tests.support.sets import full

TREE: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "fp16": {"enabled": True, "loss_scale_window": 7},
    "zero_optimization": {"stage": 3, "max_live_parameters": 9, "offload_param": {"device": "cpu"}},
}


def test_deepspeed_config_attributes() -> None:
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
    raises(AttributeError, "'stagge' is not a key of 'zero_optimization'", getattr, zero, "stagge")
    raises(AttributeError, "has no attribute 'train_batch'", getattr, config, "train_batch")
    raises(ValueError, "give at least one of them", lambda: DeepSpeedConfig({}))
    raises(NotImplementedError, "mesh_device", lambda: DeepSpeedConfig(TREE, mesh_device=object()))


EVENTS = [("Train/Samples/train loss", 0.5, 8), ("Train/Samples/lr", 1e-3, 8)]


def monitor(block: str, **keys: Any) -> Monitor:
    return Monitor(read_config({block: {"enabled": True, **keys}}))


def test_csv_monitor(tmp_path: Path) -> None:
    made = monitor("csv_monitor", output_path=str(tmp_path), job_name="job")
    assert made.enabled
    made.write_events(EVENTS)
    made.write_events([("Train/Samples/lr", 5e-4, 16)])
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text() == "step,lr\n8,0.001\n16,0.0005\n"
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text() == "step,train loss\n8,0.5\n"
    off = Monitor(read_config({"csv_monitor": {"output_path": str(tmp_path / "other")}}))
    off.write_events(EVENTS)
    assert not off.enabled and [path.name for path in tmp_path.iterdir()] == ["job"]


def test_tensorboard_and_wandb_monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def noting(*args: Any, **options: Any) -> Any:
        return lambda step, values: written.append((args, options, step, values))

    raises(NotImplementedError, "give wandb, tensorboard or csv_monitor", monitor, "comet")
    for name in ("tensorboard", "wandb"):
        monkeypatch.setattr(monitors, name, noting)
        missing = f"{name}.enabled=True needs the package .*pip install {name}"
        raises(ModuleNotFoundError, missing, monitor, name)
    monkeypatch.setattr(monitors, "require_package", lambda *_: None)
    monitor("tensorboard", output_path=str(tmp_path), job_name="t").write_events(EVENTS)
    monitor("wandb", group="g", team="e", project="p").write_events(EVENTS)
    values = {name: value for name, value, _ in EVENTS}
    run = {"project": "p", "group": "g", "entity": "e"}
    assert written == [((tmp_path / "t",), {}, 8, values), ((), run, 8, values)]


def test_get_model_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


class Net(nn.Module):
    """A model with dropout and with arguments that are not tensors."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.up, self.down, self.call = nn.Linear(6, 10), nn.Linear(10, 6), call

    def block(self, x: Tensor, power: int) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training)
        return x + self.down(hidden) ** power

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.call(self.block, self.call(self.block, x, 2), 1)
        return value.square().mean()


def test_checkpoint_gives_the_same_bits() -> None:
    plain = Net(lambda function, *args: function(*args))
    kept = copy.deepcopy(plain)
    kept.call = checkpointing.checkpoint
    x = torch.randn(4, 6)
    found = []
    for model in (plain, kept):
        torch.manual_seed(1)
        loss = model(x)
        loss.backward()
        found.append([loss, *(param.grad for param in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    with torch.no_grad():
        assert torch.equal(checkpointing.checkpoint(torch.tanh, x), torch.tanh(x))


def test_checkpointing_options_without_effect_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_configured", [])
    assert not checkpointing.is_configured()
    with pytest.warns(UserWarning, match=r"configure\(partition_activations, checkpoint_in_cpu\) has no effect"):
        checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True, num_checkpoints=4)
    with warnings.catch_warnings(action="error"):
        checkpointing.configure(None, profile=True)
        checkpointing.reset()
    assert checkpointing.is_configured()


ABOVE = ["accelerate", "peft", "lightning", "pytorch_lightning", "lightning_fabric", *full("transformers", "trl")]
NOT_OF_DEEPSPEED = {"utils.is_initialized"}
"""A model of transformers reads it inside ``try``; no recent release of DeepSpeed has it."""


def used(tree: ast.AST) -> Iterator[str]:
    """Yield dotted names below ``deepspeed`` that a file imports, or reads from the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "deepspeed":
            for each in node.names:
                yield f"{node.module}.{each.name}".partition(".")[2]
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith("deepspeed."):
                    yield each.name.partition(".")[2]
        elif isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "deepspeed":
                yield ".".join(reversed(parts))


def is_here(dotted: str) -> bool:
    """Return whether a module, or an attribute of one, can be reached by the published path."""
    path, _, name = dotted.rpartition(".")
    try:
        value = importlib.import_module(f"shardwise.deepspeed.{path}".rstrip("."))
    except ModuleNotFoundError:
        return is_here(path)  # a method of an object, such as a logger
    if hasattr(value, name):
        return True
    try:
        importlib.import_module(f"shardwise.deepspeed.{dotted}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("library", ABOVE)
def test_names_that_libraries_use_exist(library: str) -> None:
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{library} is not installed")
    asked: dict[str, str] = {}
    for path in Path(next(iter(spec.submodule_search_locations))).rglob("*.py"):
        data = path.read_bytes()
        if b"deepspeed" in data:
            asked |= dict.fromkeys(used(ast.parse(data)), path.name)
    assert asked and {name: file for name, file in asked.items() if not is_here(name)}.keys() <= NOT_OF_DEEPSPEED


def test_missing_names_are_detected() -> None:
    program = "import deepspeed.pipe\nfrom deepspeed.utils import logger, nothing\ndeepspeed.runtime.zero.none.of(1)"
    names, missing = set(used(ast.parse(program))), {"utils.nothing", "runtime.zero.none", "runtime.zero.none.of"}
    assert {"pipe", "utils.logger"} < names and {name for name in names if not is_here(name)} == missing
