"""Optimizers and schedules by name against torch's own and DeepSpeed's sequences, and one process without a launcher."""

# The tables are wider than a line.
# ruff: noqa: E501

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.core.checkpoint import CheckpointDamage
from shardwise.deepspeed.config import AssertedError
from shardwise.deepspeed.optimizers import FusedLamb, make_optimizer
from shardwise.deepspeed.schedules import make_schedule

Tree = dict[str, Any]


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


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
    given = dict(params)
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
        ("Adam", {"max_grad_norm": 1}, ValueError, "gradient_clipping"),
        ("Lamb", {"max_grad_norm": 1.0}, ValueError, "gradient_clipping"),
        ("Lamb", {"max_coef": 1.0}, ValueError, "did you mean 'max_coeff'"),
        ("Adam", {"bias_correction": False, "torch_adam": True}, ValueError, "Adam.? has no such parameter"),
        ("Adam", {"bias_correction": False, "amsgrad": True}, NotImplementedError, "amsgrad=True"),
    ],
)
def test_wrong_optimizers(name: str, params: Tree, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_optimizer(name, [_parameter()], params)


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, NotImplementedError, "optimizer.type='OneBitAdam'"),
        ({"optimizer": {"type": "Lamb", "params": {"min_coeff": 2, "max_coeff": 1}}}, ValueError, "max_coeff=1"),
        ({"optimizer": {"type": "Muon", "params": {"moon_lr": 1}}}, ValueError, "did you mean 'muon_lr'"),
        ({"optimizer": {"type": "Muon", "params": {"ns_method": "x"}}}, ValueError, "give one of 'gram', 'standard'"),
        ({"optimizer": {"type": "LBFGS"}}, ValueError, "LBFGS works on all parameters"),
        ({"optimizer": {"type": "SGD", "params": {"capturable": True}}}, ValueError, "capturable"),
    ],
)
def test_what_cannot_be_made_is_refused(block: Tree, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        deepspeed.initialize(model=nn.Linear(2, 1), config={**MINIMAL, **block})


def test_schedules_of_deepspeed_are_listed_by_name() -> None:
    from shardwise.deepspeed.runtime import lr_schedules

    assert lr_schedules.VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR"])
def test_an_automatic_peak_is_the_optimizers_rate(name: str) -> None:
    more = {"total_num_steps": 8} if name == "WarmupDecayLR" else {}
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 4, **more}
    config = {"scheduler": {"type": name, "params": params}, "optimizer": {"type": "SGD", "params": {"lr": 0.3}}}
    model = nn.Linear(2, 1)
    engine = deepspeed.initialize(model=model, config={**MINIMAL, **config})[0]
    rates = []
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        rates += engine.get_lr()
    engine.destroy()
    assert max(rates) == pytest.approx(0.3)
    config["scheduler"]["type"] = "OneCycle"
    with pytest.raises(ValueError, match=r"OneCycle has no such parameter"):
        deepspeed.initialize(model=nn.Linear(2, 1), config={**MINIMAL, **config})


# Rates before the first step and after each, as DeepSpeed 0.19.8 printed them.
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
    optimizer = torch.optim.Adam([_parameter()], lr=0.3)
    schedule = make_schedule(name, optimizer, params)
    found = [optimizer.param_groups[0]["lr"]]
    states = []
    for _ in rates[1:]:
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
        states.append(schedule.state_dict())
    assert found == pytest.approx(rates, rel=1e-12, abs=1e-15)
    again = make_schedule(name, torch.optim.Adam([_parameter()], lr=0.3), params)
    again.load_state_dict(states[0])
    again.optimizer.step()
    again.optimizer.param_groups[0]["lr"] = found[1]
    again.step()
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(rates[2], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("name", "params", "rates"), [each for each in RATES if each[0] != "StepLR"])
def test_a_step_with_a_number_is_that_step(name: str, params: Tree, rates: list[float]) -> None:
    optimizer = torch.optim.Adam([_parameter()], lr=0.3)
    schedule: Any = make_schedule(name, optimizer, params)
    optimizer.step()
    for number in (2, 0, 1, None):  # None: the next one
        schedule.step(*([] if number is None else [number]))
        at = 2 if number is None else number
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[at + 1], rel=1e-12, abs=1e-15)
        assert schedule.state_dict() == {"last_batch_iteration": at}
    if name == "WarmupCosineLR":
        assert schedule.get_lr_ratio() == pytest.approx(rates[3] / 0.3)


def test_one_cycle_tells_its_momentum() -> None:
    optimizer = torch.optim.Adam([{"params": [_parameter()]}, {"params": [_parameter()]}], lr=0.3)
    bounds = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 2, "decay_step_size": 2}
    momentum = {"cycle_min_mom": [0.8, 0.6], "cycle_max_mom": 0.9, "decay_mom_rate": 0.5}
    schedule: Any = make_schedule("OneCycle", optimizer, {**bounds, **momentum})
    optimizer.step()
    assert schedule.get_mom() == [(0.9, 0.99), (0.9, 0.99)]
    # Down to the minimum and up again, then decaying as the rate does.
    for betas in [(0.85, 0.75), (0.8, 0.6), (0.85, 0.75), (0.9, 0.9), (0.72, 0.72)]:
        schedule.step()
        assert [found for found, _ in schedule.get_mom()] == pytest.approx(betas)
        assert [group["betas"] for group in optimizer.param_groups] == schedule.get_mom()
    still: Any = make_schedule("OneCycle", optimizer, {**bounds, "cycle_momentum": False})
    assert still.get_mom() is None


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLr", {}, "did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, "did you mean 'warmup_num_steps'"),
        ("WarmupDecayLR", {}, "needs 'total_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps=0"),
        ("WarmupLR", {"warmup_num_steps": None}, "warmup_num_steps=None"),
        ("WarmupLR", {"warmup_num_steps": math.inf}, "warmup_num_steps=inf"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0]}, "for 1 param groups"),
    ],
)
def test_wrong_schedules(name: str, params: Tree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, torch.optim.SGD([_parameter()], lr=0.1), params)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_warm_up_that_is_not_known_is_logarithmic_with_a_warning(name: str) -> None:
    def rates(**more: Any) -> list[float]:
        optimizer = torch.optim.SGD([_parameter()], lr=0.1)
        params = {"warmup_num_steps": 5, **({} if name == "WarmupLR" else {"total_num_steps": 9}), **more}
        schedule = make_schedule(name, optimizer, params)
        found = []
        for _ in range(8):
            found.append(optimizer.param_groups[0]["lr"])
            schedule.step()
        return found

    with pytest.warns(UserWarning, match="warmup_type='steep' is not known, and 'log' is taken"):
        found = rates(warmup_type="steep")
    assert found == rates(warmup_type="log") != rates(warmup_type="linear")


MINIMAL = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": MINIMAL, "model": None}, AssertedError, "model=None"),
        ({}, ValueError, "0 configurations given: \\[\\]"),
        ({"config": {}}, ValueError, "give at least one of them"),
        ({"config": MINIMAL, "mpu": 1}, ValueError, "mpu=1 has no get_data_parallel_group"),
        ({"config": MINIMAL, "mesh_param": 1}, ValueError, "mesh_param=1: give"),
        (
            {"config": MINIMAL | {"sequence_parallel_size": 2}, "mesh_param": (1, 4)},
            ValueError,
            "_size=2 of the config",
        ),
        ({"config": {**MINIMAL, "optimizer": None, "scheduler": {"type": "WarmupLR"}}}, ValueError, "without an opt"),
    ],
)
def test_initialize_refuses(arguments: Tree, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        deepspeed.initialize(**{"model": nn.Linear(2, 1), **arguments})


def test_wrong_calls_of_an_engine_are_what_deepspeed_asserts() -> None:
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config={**MINIMAL, "managed_gradient_accumulation": False})[0]
    for call, message in (
        (
            lambda: engine.scale(engine(torch.ones(2, 2))),
            r"scale\(loss of shape \(2, 1\).*: give the scalar tensor that",
        ),
        (lambda: engine.backward(torch.ones(())), r"backward\(loss of shape \(\), requires_grad=False\)"),
        (
            lambda: engine.set_gradient_accumulation_boundary(True),
            r"set_gradient_accumulation_boundary\(True\) without",
        ),
    ):
        for kind in (AssertionError, ValueError):
            with pytest.raises(kind, match=message):
                call()
    engine.destroy()


def test_one_process_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {**MINIMAL, "steps_per_print": 1}
    data = [(torch.ones(2), torch.ones(1)) for _ in range(3)]
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=nn.Linear(2, 1), config=tree, training_data=data, lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)
    )  # fmt: skip
    assert loader is not None and len(loader) == 3 and schedule is engine.lr_scheduler and optimizer is engine.optimizer
    with pytest.raises(ValueError, match="give the scalar"):
        engine.backward(torch.ones(2))
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
    with pytest.raises(RuntimeError, match="optimizer=None"):
        inference.step()
    inference.destroy()


def test_a_damaged_newest_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config=MINIMAL)[0]
    for tag in ("older", "newest"):
        engine.save_checkpoint(str(tmp_path), tag)
    (tmp_path / "latest").unlink()
    manifest = tmp_path / "newest" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"newest", b"mewest"))
    with pytest.raises(CheckpointDamage, match=r"newest/manifest\.json"):
        engine.load_checkpoint(str(tmp_path))
    engine.destroy()


INIT_REFUSES: list[tuple[Tree, type[Exception], str]] = [
    ({"mpu": object()}, ValueError, "mpu=.* has no get_data_parallel_group"),
    (
        {"data_parallel_group": "some"},
        ValueError,
        "data_parallel_group='some' but torch.distributed is not initialised",
    ),
    ({"sequence_data_parallel_group": "some"}, ValueError, "^sequence_data_parallel_group='some'"),
    (
        {"zero_param_parallel_group": "some"},
        NotImplementedError,
        "no argument for zero_optimization.zero_hpz_partition_size",
    ),
    ({"zero_quantized_weights": True}, NotImplementedError, "no argument for zero_optimization.zero_quantized_weights"),
    ({"zero_quantized_nontrainable_weights": True}, NotImplementedError, "give that key in the configuration"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), INIT_REFUSES)
def test_zero_init_refuses_what_would_change_the_training(
    arguments: Tree, error: type[Exception], message: str
) -> None:
    for enabled in (True, False):
        with pytest.raises(error, match=message):
            deepspeed.zero.Init(**arguments, enabled=enabled)


HALF = {"bf16": {"enabled": True}}
INIT_WARNS: list[tuple[Tree, str]] = [
    ({}, ""),
    ({"config": HALF, "dtype": torch.bfloat16, "remote_device": "cpu", "pin_memory": True}, ""),
    ({"config": HALF, "dtype": torch.float16, "enabled": False}, ""),
    ({"config": HALF, "dtype": torch.float16}, "dtype=torch.float16.*has torch.bfloat16"),
    ({"config_dict_or_path": {}, "dtype": torch.float16}, "dtype=torch.float16.*has torch.float32"),
]


@pytest.mark.parametrize(("arguments", "message"), INIT_WARNS)
def test_zero_init_says_what_the_configuration_decides(arguments: Tree, message: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deepspeed.zero.Init(**arguments)
    texts = [str(each.message) for each in caught]
    assert len(texts) == bool(message) and all(re.search(message, text) for text in texts), texts
    assert all(each.filename == __file__ for each in caught), "the warning points at the caller"
