"""Tests of DeepSpeed's API in one process.

- Optimizers and schedulers by name match torch's and the rates that DeepSpeed prints.
- ``initialize`` and ``zero.Init``: training without a launcher, invalid arguments, warnings.
- Smaller functions and classes that programs call: parameter attributes, ``comm``, the accelerator, logging, ``ops``.
"""

# The tables are wider than a line.
# ruff: noqa: E501

import importlib
import logging
import math
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.compat import UnsupportedName
from shardwise.core.checkpoint import CheckpointDamage
from shardwise.deepspeed import initialization
from shardwise.deepspeed.config import AssertedError, read_config
from shardwise.deepspeed.optimizers import FusedLamb, make_optimizer
from shardwise.deepspeed.schedules import make_schedule
from tests.support.ds_setup import close, ds_config, optimizer_block
from tests.support.on_ranks import assert_refused, raises

Tree = dict[str, Any]


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def scheduled(name: str, params: Tree) -> Any:
    return make_schedule(name, torch.optim.Adam([_parameter()], lr=0.3), params)


OPTIMIZERS: list[tuple[str, Tree, Callable[[Any], torch.optim.Optimizer]]] = [
    ("Adam", {"lr": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
    ("AdamW", {"torch_adam": True}, lambda p: torch.optim.AdamW(p)),
    ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, lambda p: torch.optim.Adam(p, weight_decay=0.1)),
    ("AdamW", {"adam_w_mode": False, "betas": [0.8, 0.9]}, lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9), weight_decay=0.0)),
    ("Lamb", {"lr": 0.2, "betas": [0.8, 0.9]}, lambda p: FusedLamb(p, lr=0.2, betas=(0.8, 0.9))),
    ("Adagrad", {"lr": 0.2}, lambda p: torch.optim.Adagrad(p, lr=0.2)),
    ("SGD", {"lr": 0.3, "momentum": 0.5}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "make"), OPTIMIZERS)
def test_optimizers(name: str, params: Tree, make: Any) -> None:
    texts = {key: value if isinstance(value, list) else str(value) for key, value in params.items()}
    given = read_config({"optimizer": {"type": name, "params": texts}})["optimizer.params"]
    found, expected = make_optimizer(name, [_parameter()], params), make([_parameter()])
    assert type(found) is type(expected) and params == given
    groups = [{k: v for k, v in each.param_groups[0].items() if k != "params"} for each in (found, expected)]
    assert groups[0] == groups[1]


@pytest.mark.parametrize(
    ("name", "params", "error", "message"),
    [
        ("AdemW", {}, ValueError, "did you mean 'AdamW'"),
        ("FusedLamb", {}, ValueError, "did you mean 'Lamb'"),
        ("SGD", {"lrr": 1}, ValueError, "optimizer.params.lrr=1.*did you mean 'lr'"),
        ("SGD", {"lr": "x"}, ValueError, "optimizer.params.lr='x': give a number"),
        ("Adam", {"max_grad_norm": 1}, ValueError, "gradient_clipping"),
        ("Lamb", {"max_grad_norm": 1.0}, ValueError, "gradient_clipping"),
        ("Lamb", {"max_coef": 1.0}, ValueError, "did you mean 'max_coeff'"),
        ("Adam", {"bias_correction": False, "torch_adam": True}, ValueError, "Adam.? has no such parameter"),
        ("Adam", {"bias_correction": False, "amsgrad": True}, NotImplementedError, "amsgrad=True"),
        ("WarmupLr", {}, ValueError, "did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, ValueError, "did you mean 'warmup_num_steps'"),
        ("WarmupDecayLR", {}, ValueError, "needs 'total_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, ValueError, "warmup_num_steps=0"),
        ("WarmupLR", {"warmup_num_steps": None}, ValueError, "warmup_num_steps=None"),
        ("WarmupLR", {"warmup_num_steps": math.inf}, ValueError, "warmup_num_steps=inf"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0]}, ValueError, "for 1 param groups"),
    ],
)
def test_invalid_optimizers_and_schedulers(name: str, params: Tree, error: type[Exception], message: str) -> None:
    if name.startswith("Warmup"):
        raises(error, message, scheduled, name, params)
    else:
        raises(error, message, make_optimizer, name, [_parameter()], params)


def test_scheduler_names() -> None:
    from shardwise.deepspeed.runtime import lr_schedules

    assert lr_schedules.VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


@pytest.mark.parametrize(("name", "more"), [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 8})])
def test_auto_peak_is_the_rate_of_the_optimizer(name: str, more: Tree) -> None:
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 4, **more}
    config = MINIMAL | {"scheduler": {"type": name, "params": params}}
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config=config)[0]
    rates = []
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        rates += engine.get_lr()
    engine.destroy()
    assert max(rates) == pytest.approx(0.1)
    config["scheduler"] = {"type": "OneCycle", "params": params}
    raises(ValueError, "OneCycle has no such parameter", deepspeed.initialize, model=nn.Linear(2, 1), config=config)


# Rates before the first step and after each step, as DeepSpeed 0.19.8 printed them.
RATES: list[tuple[str, Tree, list[float]]] = [
    ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}, [0.1, 0.1, 0.325, 0.55, 0.775, 1.0]),
    ("WarmupLR", {"warmup_num_steps": 5}, [0.0, 0.0, 0.12920296742201792, 0.2047818583457956]),
    ("WarmupDecayLR", {"total_num_steps": 6, "warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"}, [0.0, 0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]),
    ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.0}, [0.0, 0.0, 0.15, 0.15, 0.0, 0.0]),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_staircase": True}, [0.1, 0.1, 0.2, 0.2, 0.3]),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 2}, [0.1, 0.5, 0.9, 0.5, 0.1, 0.1]),
    ("StepLR", {"step_size": 1, "gamma": 0.5}, [0.3, 0.15, 0.075]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "rates"), RATES)
def test_schedules(name: str, params: Tree, rates: list[float]) -> None:
    schedule = scheduled(name, params)
    optimizer = schedule.optimizer
    found = [optimizer.param_groups[0]["lr"]]
    states = []
    for _ in rates[1:]:
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
        states.append(schedule.state_dict())
    assert found == pytest.approx(rates, rel=1e-12, abs=1e-15)
    again = scheduled(name, params)
    again.load_state_dict(states[0])
    again.optimizer.step()
    again.optimizer.param_groups[0]["lr"] = found[1]
    again.step()
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(rates[2], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("name", "params", "rates"), [each for each in RATES if each[0] != "StepLR"])
def test_step_with_a_number(name: str, params: Tree, rates: list[float]) -> None:
    schedule = scheduled(name, params)
    optimizer = schedule.optimizer
    optimizer.step()
    for number in (2, 0, 1, None):  # None is the next step
        schedule.step(*([] if number is None else [number]))
        at = 2 if number is None else number
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[at + 1], rel=1e-12, abs=1e-15)
        assert schedule.state_dict() == {"last_batch_iteration": at}
    if name == "WarmupCosineLR":
        assert schedule.get_lr_ratio() == pytest.approx(rates[3] / 0.3)


def test_one_cycle_momentum() -> None:
    optimizer = torch.optim.Adam([{"params": [_parameter()]}, {"params": [_parameter()]}], lr=0.3)
    bounds = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 2, "decay_step_size": 2}
    momentum = {"cycle_min_mom": [0.8, 0.6], "cycle_max_mom": 0.9, "decay_mom_rate": 0.5}
    schedule: Any = make_schedule("OneCycle", optimizer, {**bounds, **momentum})
    optimizer.step()
    assert schedule.get_mom() == [(0.9, 0.99), (0.9, 0.99)]
    # Down to the minimum, up again, and then decaying with the rate.
    for betas in [(0.85, 0.75), (0.8, 0.6), (0.85, 0.75), (0.9, 0.9), (0.72, 0.72)]:
        schedule.step()
        assert [found for found, _ in schedule.get_mom()] == pytest.approx(betas)
        assert [group["betas"] for group in optimizer.param_groups] == schedule.get_mom()
    still: Any = make_schedule("OneCycle", optimizer, {**bounds, "cycle_momentum": False})
    assert still.get_mom() is None


TOTAL = {"total_num_steps": 9}


@pytest.mark.parametrize(("name", "total"), [("WarmupLR", {}), ("WarmupDecayLR", TOTAL), ("WarmupCosineLR", TOTAL)])
def test_unknown_warmup_type_warns_and_is_logarithmic(name: str, total: Tree) -> None:
    def rates(kind: str) -> list[float]:
        schedule = scheduled(name, {"warmup_num_steps": 5, "warmup_type": kind, **total})
        found = []
        for _ in range(8):
            found.append(schedule.optimizer.param_groups[0]["lr"])
            schedule.step()
        return found

    with pytest.warns(UserWarning, match="warmup_type='steep' is not known, and 'log' is taken"):
        found = rates("steep")
    assert found == rates("log") != rates("linear")


MINIMAL: Tree = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": optimizer_block("SGD", lr=0.1)}


def making(kind: str, **params: Any) -> Tree:
    return {"config": MINIMAL | {"optimizer": optimizer_block(kind, **params)}}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": MINIMAL, "model": None}, AssertedError, "model=None"),
        ({}, ValueError, "0 configurations given: \\[\\]"),
        ({"config": {}}, ValueError, "give at least one of them"),
        ({"config": MINIMAL, "mpu": 1}, ValueError, "mpu=1 has no get_data_parallel_group"),
        ({"config": MINIMAL, "mesh_param": 1}, ValueError, "mesh_param=1: give"),
        ({"config": MINIMAL | {"sequence_parallel_size": 2}, "mesh_param": (1, 4)}, ValueError, "_size=2 of the config"),
        ({"config": {**MINIMAL, "optimizer": None, "scheduler": {"type": "WarmupLR"}}}, ValueError, "without an opt"),
        (making("OneBitAdam"), NotImplementedError, "optimizer.type='OneBitAdam'"),
        (making("Lamb", min_coeff=2, max_coeff=1), ValueError, "max_coeff=1"),
        (making("Muon", moon_lr=1), ValueError, "did you mean 'muon_lr'"),
        (making("Muon", ns_method="x"), ValueError, "give one of 'gram', 'standard'"),
        (making("LBFGS"), ValueError, "LBFGS works on all parameters"),
        (making("SGD", capturable=True), ValueError, "capturable"),
    ],
)  # fmt: skip
def test_initialize_invalid_arguments(arguments: Tree, error: type[Exception], message: str) -> None:
    raises(error, message, lambda: deepspeed.initialize(**{"model": nn.Linear(2, 1), **arguments}))


def test_wrong_calls_raise_assertion_errors() -> None:
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config={**MINIMAL, "managed_gradient_accumulation": False})[0]
    for kind in (AssertionError, ValueError):
        scalar = r"scale\(loss of shape \(2, 1\).*: give the scalar tensor that"
        raises(kind, scalar, engine.scale, engine(torch.ones(2, 2)))
        raises(kind, r"backward\(loss of shape \(\), requires_grad=False\)", engine.backward, torch.ones(()))
        boundary = engine.set_gradient_accumulation_boundary
        raises(kind, r"set_gradient_accumulation_boundary\(True\) without", boundary, True)
    engine.destroy()


def test_one_process_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {**MINIMAL, "steps_per_print": 1}
    data = [(torch.ones(2), torch.ones(1)) for _ in range(3)]
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=nn.Linear(2, 1), config=tree, training_data=data, lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)
    )  # fmt: skip
    assert loader is not None and len(loader) == 3 and schedule is engine.lr_scheduler and optimizer is engine.optimizer
    raises(ValueError, "give the scalar", lambda: engine.backward(torch.ones(2)))
    for inputs, targets in loader:
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    assert engine.get_lr() == [pytest.approx(1e-4)] and engine.get_mom() == [0]
    output = capsys.readouterr().out
    assert output.count("step=") == 3
    engine.set_train_batch_size(2)
    assert engine.get_batch_info() == (2, 1, 2)
    engine.destroy()
    inference = deepspeed.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1, "gradient_clipping": 0})[0]
    raises(RuntimeError, "optimizer=None", lambda: inference.step())
    inference.destroy()


def test_damaged_newest_checkpoint_raises(tmp_path: Path) -> None:
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config=MINIMAL)[0]
    for tag in ("older", "newest"):
        engine.save_checkpoint(str(tmp_path), tag)
    (tmp_path / "latest").unlink()
    manifest = tmp_path / "newest" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"newest", b"mewest"))
    raises(CheckpointDamage, r"newest/manifest\.json", lambda: engine.load_checkpoint(str(tmp_path)))
    engine.destroy()


INIT_REFUSES: list[tuple[Tree, type[Exception], str]] = [
    ({"mpu": object()}, ValueError, "mpu=.* has no get_data_parallel_group"),
    ({"data_parallel_group": "some"}, ValueError, "data_parallel_group='some' but torch.distributed is not initialized"),
    ({"sequence_data_parallel_group": "some"}, ValueError, "^sequence_data_parallel_group='some'"),
    ({"zero_param_parallel_group": "some"}, NotImplementedError, "no argument for zero_optimization.zero_hpz_partition_size"),
    ({"zero_quantized_weights": True}, NotImplementedError, "no argument for zero_optimization.zero_quantized_weights"),
    ({"zero_quantized_nontrainable_weights": True}, NotImplementedError, "give that key in the configuration"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), INIT_REFUSES)
def test_zero_init_invalid_arguments(arguments: Tree, error: type[Exception], message: str) -> None:
    for enabled in (True, False):
        raises(error, message, deepspeed.zero.Init, **arguments, enabled=enabled)


HALF = {"bf16": {"enabled": True}}
INIT_WARNS: list[tuple[Tree, str]] = [
    ({}, ""),
    ({"config": HALF, "dtype": torch.bfloat16, "remote_device": "cpu", "pin_memory": True}, ""),
    ({"config": HALF, "dtype": torch.float16, "enabled": False}, ""),
    ({"config": HALF, "dtype": torch.float16}, "dtype=torch.float16.*has torch.bfloat16"),
    ({"config_dict_or_path": {}, "dtype": torch.float16}, "dtype=torch.float16.*has torch.float32"),
]


@pytest.mark.parametrize(("arguments", "message"), INIT_WARNS)
def test_zero_init_warns_of_another_dtype(arguments: Tree, message: str) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        deepspeed.zero.Init(**arguments)
    texts = [str(each.message) for each in caught]
    assert len(texts) == bool(message) and all(re.search(message, text) for text in texts), texts
    assert all(each.filename == __file__ for each in caught), "the warning points at the caller"


def found(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"shardwise.deepspeed.{path}".rstrip(".")), name)


comm: Any = importlib.import_module("shardwise.deepspeed.comm")
groups: Any = importlib.import_module("shardwise.deepspeed.utils.groups")
utils: Any = importlib.import_module("shardwise.deepspeed.utils")
zero: Any = importlib.import_module("shardwise.deepspeed.zero")


def test_parameter_attributes_and_leaf_modules() -> None:
    weight, leaf = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)
    is_divided = found("runtime.utils", "is_model_parallel_parameter")
    assert not is_divided(weight) and not found("runtime.zero.utils", "is_zero_param")(weight)
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert is_divided(weight)
    model = nn.Sequential(leaf, nn.ReLU())
    assert utils.set_z3_leaf_modules(model, ["Linear"]) == [leaf] == utils.set_z3_leaf_modules(model, [nn.Linear])
    assert utils.set_z3_leaf_modules(model, [nn.Conv1d], raise_if_not_found=False) == []
    raises(ValueError, "no module of the model is one of", lambda: utils.set_z3_leaf_modules(model, [nn.Conv1d]))
    assert utils.unset_z3_leaf_modules(model, [nn.Linear]) == [leaf] and utils.get_z3_leaf_modules(model) == []
    for setter, name in ((utils.set_z3_leaf_modules_by_name, "0"), (utils.set_z3_leaf_modules_by_suffix, "0")):
        assert setter(model, [name, "x"]) == ([leaf], ["x"]) and utils.get_z3_leaf_modules(model) == [leaf]
        assert setter(model, [name], flag=False) == ([leaf], []) and not utils.z3_leaf_module(leaf)
        raises(ValueError, "no module of the model is one of", setter, model, ["x"])
    utils.set_z3_leaf_module(leaf, True)
    assert utils.get_z3_leaf_modules(model) == [leaf]


def test_checkpoint_files_are_sorted_by_number(tmp_path: Path) -> None:
    for kind, pattern in (
        ("get_optim_files", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
        ("get_model_state_files", "mp_rank_{:02d}_model_states.pt"),
    ):
        files = found("utils.zero_to_fp32", kind)
        with pytest.raises(FileNotFoundError, match=r"has no \*_"):
            files(str(tmp_path))
        expected = [tmp_path / pattern.format(number) for number in (0, 2, 10, 100)]
        for path in reversed(expected):
            path.touch()
        assert files(str(tmp_path)) == [str(path) for path in expected]
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    first = found("utils.zero_to_fp32", "get_model_state_file")
    for stage, name in ((2, "mp_rank_00"), (3, "zero_pp_rank_0_mp_rank_00")):
        assert first(str(tmp_path), stage) == str(tmp_path / f"{name}_model_states.pt")


class Sharing(nn.ModuleDict):
    """A model whose forward pass reads a parameter of another module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(x) @ self.owner.weight


def test_external_parameters() -> None:
    model = Sharing({"owner": nn.Linear(3, 3, bias=False), "reader": nn.Linear(3, 3, bias=False)})
    x = torch.ones(2, 3)
    plain = model(x).detach()
    weights = [param.detach().clone() for param in model.parameters()]
    zero.register_external_parameter(model.reader, model.owner.weight)
    engine = deepspeed.initialize(model=model, config=ds_config(3))[0]
    assert torch.equal(engine(x), plain)
    kind = zero.ZeroParamType
    assert {param.ds_param_type for param in engine.parameters()} == {kind.PARTITIONED} != {kind.NORMAL, kind.REMOTE}
    zero.unregister_external_parameter(model.reader, model.owner.weight)
    assert torch.equal(engine(x), plain)
    with zero.unwrap_model_for_generation(engine) as whole:
        assert whole is model
        assert all(torch.equal(*pair) for pair in zip(whole.parameters(), weights, strict=True))
        assert torch.equal(whole(x), plain)
    with zero.unwrap_model_for_generation(model.reader) as same:
        assert same is model.reader
    engine.destroy()


def test_zero_wrapper_for_fp_tensor_constructor() -> None:
    ones = zero.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.float16)
    assert torch.equal(ones(2), torch.ones(2).half()) and ones(2, dtype=torch.float64).dtype == torch.float16
    assert ones(2).dtype == torch.float16 and ones(2, dtype=torch.int64).dtype == torch.int64


def test_clip_grad_norm_is_torchs() -> None:
    assert found("runtime.utils", "clip_grad_norm_") is torch.nn.utils.clip_grad_norm_


def test_modules_have_the_names_of_the_table() -> None:
    for module, name in (("zero", "free_param"), ("checkpointing", "get_cuda_rng_tracker")):
        raises(UnsupportedName, name, found(module, name))
    raises(AttributeError, "Inti", found, "zero", "Inti")


def test_version_attributes() -> None:
    assert deepspeed.__version__ == deepspeed.version == found("git_version_info", "version") == "0.19.8"
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert parts == (0, 19, 8)
    assert found("launcher.runner", "DEEPSPEED_ENVIRONMENT_NAME").startswith(".")
    assert not found("runtime.compiler", "is_compiling")()


def test_comm_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comm.is_available() and not comm.is_initialized()
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    comm.init_distributed("gloo", dist_init_required=False)
    comm.init_distributed(timeout=timedelta(seconds=1))  # no launcher: nothing to do
    comm.init_distributed(timeout=timedelta(seconds=1), rank=0, world_size=1)  # the defaults
    # Other arguments are passed to torch, which reports what is missing.
    begin = partial(comm.init_distributed, "gloo", timeout=timedelta(seconds=1))
    raises(ValueError, "rank parameter missing", begin, init_method="tcp://127.0.0.1:1")
    raises(ValueError, "MASTER_ADDR expected", begin, rank=1, world_size=2)
    assert not comm.is_initialized()
    assert (groups._get_data_parallel_world_size(), groups.get_model_parallel_world_size()) == (1, 1)
    assert groups._get_sequence_parallel_world_size() == 1 and groups.get_model_parallel_group() is None
    assert groups.get_tensor_model_parallel_src_rank() == groups.get_sequence_parallel_rank() == 0
    assert comm.get_world_group() is None and comm.get_global_rank(None, 0) == 0
    assert found("constants", "TORCH_DISTRIBUTED_DEFAULT_PORT") == 29500
    assert comm.default_pg_timeout is found("constants", "default_pg_timeout")
    assert comm.default_pg_timeout.total_seconds() == 600


def test_accelerator() -> None:
    device = deepspeed.get_accelerator()
    kind = "cuda" if torch.cuda.is_available() and device.device_name() == "cuda" else "cpu"
    assert device is found("accelerator", "get_accelerator")() and device.device_name() == kind
    assert device.communication_backend_name() == ("gloo" if kind == "cpu" else "nccl")
    assert device.device_count() >= 1 and device.is_available()
    assert device.is_bf16_supported() and device.is_fp16_supported()
    assert 0 <= device.memory_allocated() <= device.max_memory_allocated()
    first = torch.rand(3, device=device.current_device_name())
    device.manual_seed(5)
    assert torch.initial_seed() == 5
    device.synchronize()
    device.empty_cache()
    assert device.on_accelerator(first) and device.current_device() == ("cpu" if kind == "cpu" else 0)
    raises(AttributeError, "call torch's function for", getattr, device, "is_triton_supported")


def test_see_memory_usage(capsys: pytest.CaptureFixture[str]) -> None:
    see = found("runtime.utils", "see_memory_usage")
    see("before")
    assert capsys.readouterr().out == ""
    see("before", force=True)
    assert "before: " in capsys.readouterr().out


def test_logging(capsys: pytest.CaptureFixture[str]) -> None:
    before = utils.logger.level
    try:
        utils.logger.setLevel(logging.INFO)
        utils.log_dist("hello", ranks=[0])
        utils.log_dist("elsewhere", ranks=[1])
        for _ in range(2):
            utils.logger.warning_once("warned in a test")
        utils.logger.setLevel(logging.WARNING)
        utils.log_dist("quiet")
        out = capsys.readouterr().out
        assert out.count("[Rank 0] hello") == out.count("warned in a test") == 1
        assert "quiet" not in out and "elsewhere" not in out
    finally:
        utils.logger.setLevel(before)


def test_repeating_loader_and_tensor_utilities() -> None:
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and len(loader) == 2 and iter(loader) is loader
    value = torch.ones(4)
    item = {"a": [value[:2], (value, 3)], "b": None}
    cloned = found("checkpoint.utils", "clone_tensors_for_torch_save")(item)
    assert cloned["a"][0].untyped_storage().nbytes() == 8 and cloned["a"][1][1] == 3 and cloned["b"] is None
    moved = found("runtime.utils", "move_to_device")(item, "meta", lambda tensor: tensor.numel() == 2)
    assert moved["a"][0].is_meta and not moved["a"][1][0].is_meta


def test_leaf_modules_change_same_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    settings = read_config({"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert initialization._plan(settings, 2, model).comm.same_order is None
    utils.set_z3_leaf_modules(model, [nn.Linear])
    assert initialization._plan(settings, 2, model).comm.same_order is False


def steps(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> torch.Tensor:
    for number in range(3):
        param.grad = torch.linspace(-1.0, 1.0, 6) * (number + 1)
        optimizer.step()
    return param.detach()


def test_ops_optimizers_match_torch() -> None:
    cpu_adam, fused_adam = found("ops.adam", "DeepSpeedCPUAdam"), found("ops.adam", "FusedAdam")
    adagrad, lion = found("ops.adagrad", "DeepSpeedCPUAdagrad"), found("ops.lion", "DeepSpeedCPULion")

    def after(kind: Any, **options: Any) -> torch.Tensor:
        param = nn.Parameter(torch.linspace(1.0, 2.0, 6))
        return steps(kind([param], lr=0.1, weight_decay=0.01, **options), param)

    for decoupled, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        torch.testing.assert_close(after(cpu_adam, adamw_mode=decoupled), after(reference))
        torch.testing.assert_close(after(fused_adam, adam_w_mode=decoupled), after(reference))
    torch.testing.assert_close(after(adagrad), after(torch.optim.Adagrad))
    for cls in (lion, found("ops.lion", "FusedLion")):
        torch.testing.assert_close(after(cls, betas=(0.9, 0.99)), by_hand(torch.linspace(1.0, 2.0, 6)))
    for cls in (cpu_adam, fused_adam, adagrad):
        raises(NotImplementedError, "amsgrad=True", after, cls, amsgrad=True)
    raises(ValueError, "betas", after, lion, betas=(0.9, 1.0))


@pytest.mark.parametrize(("inside", "corrected", "bounds"), [(False, True, (0.01, 10.0)), (True, False, (0.7, 0.9))])
def test_fused_lamb_matches_its_formula(inside: bool, corrected: bool, bounds: tuple[float, float]) -> None:
    lamb = found("ops.lamb", "FusedLamb")
    assert lamb is found("ops.lamb.fused_lamb", "FusedLamb")
    weight, average, squares, ratio = torch.linspace(1.0, 2.0, 6), torch.zeros(6), torch.zeros(6), torch.tensor(0.0)
    for number in range(1, 4):
        grad = torch.linspace(-1.0, 1.0, 6) * number
        average, squares = 0.9 * average + 0.1 * grad, 0.999 * squares + 0.001 * grad**2
        update = average / ((squares + 1e-8).sqrt() if inside else squares.sqrt() + 1e-8) + 0.01 * weight
        ratio = (weight.norm() / update.norm()).clamp(*bounds)
        rate = 0.1 * (1 - 0.999**number) ** 0.5 / (1 - 0.9**number) if corrected else 0.1
        weight = weight - rate * ratio * update
    options = {"min_coeff": bounds[0], "max_coeff": bounds[1], "bias_correction": corrected, "eps_inside_sqrt": inside}
    optimizer = lamb([param := nn.Parameter(torch.linspace(1.0, 2.0, 6))], lr=0.1, weight_decay=0.01, **options)
    torch.testing.assert_close(steps(optimizer, param), weight)
    assert optimizer.get_lamb_coeffs() == pytest.approx([float(ratio)])
    zero = nn.Parameter(torch.zeros(2))
    zero.grad = torch.ones(2)
    unbounded = lamb([zero], lr=0.1, bias_correction=False, min_coeff=2.0)
    unbounded.step()
    assert unbounded.get_lamb_coeffs() == [1.0]  # 1 if a norm is 0, for any bounds
    raises(ValueError, r"max_grad_norm=1\.0: give gradient_clipping", lambda: lamb([zero], max_grad_norm=1.0))
    raises(RuntimeError, "amsgrad=True", lambda: lamb([zero], amsgrad=True))


def by_hand(value: torch.Tensor) -> torch.Tensor:
    """Return the weights after three steps of Lion, computed with plain tensor operations."""
    average = torch.zeros(6)
    for number in range(3):
        grad = torch.linspace(-1.0, 1.0, 6) * (number + 1)
        value = value * (1 - 0.1 * 0.01) - 0.1 * torch.sign(0.9 * average + 0.1 * grad)
        average = 0.99 * average + 0.01 * grad
    return value


def test_lion_by_name() -> None:
    model = nn.Linear(3, 2)
    engine = deepspeed.initialize(model=model, **making("Lion", lr=0.1, betas=[0.9, 0.99]))[0]
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    torch.testing.assert_close(close(engine)["weight"], before - 0.1)


def test_tp_model_init_must_agree_with_the_configuration() -> None:
    config: dict[str, Any] = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}}
    model = nn.Linear(2, 2)
    assert deepspeed.tp_model_init(model, 4, torch.float32, config=config) is model
    sizes = r"tp_size of tp_model_init and tensor_parallel\.autotp_size .* are \[2, 4\]"
    raises(ValueError, sizes, deepspeed.initialize, model=model, config=config)
    # The size of tp_model_init applies if the configuration has none; there is only one rank here.
    wrapped = nn.Sequential(nn.Sequential(model), nn.ReLU())
    without: dict[str, Any] = {"train_batch_size": 1, "tensor_parallel": {"tp_overlap_comm": False}}
    for each, given in ((model, {"train_batch_size": 1}), (model, without), (wrapped, {"train_batch_size": 1})):
        sizes = "autotp_size=4 x sequence_parallel_size=1 does not divide"
        raises(ValueError, sizes, deepspeed.initialize, model=each, config=given)
    deepspeed.tp_model_init(model, 1, torch.float16)  # the last call counts
    deepspeed.initialize(model=wrapped, config={"train_batch_size": 1, "gradient_clipping": 0.0})[0].destroy()
    assert_refused(
        (lambda: deepspeed.tp_model_init(model, 0, torch.float32), "tp_size=0: give a number of ranks"),
        (lambda: deepspeed.tp_model_init(model, 2, torch.float32, tp_group="mine"), "tp_group='mine' "),
    )
