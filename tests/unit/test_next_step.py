"""A scheduler's state with which its next step would raise is refused; every state that a run can reach is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from shardwise.core.checkpoint.schedulers import fitting_state, why_no_step
from shardwise.deepspeed.schedules import WarmupDecayLR
from shardwise.nn import lr_scheduler as own

Optimizer = torch.optim.Optimizer
MAKE: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, 3),
    "CyclicLR with a range": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, 3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.StepLR(o, 3)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.StepLR(o, 3)]
    ),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 6),
    "CosineAnnealingWarmupLR": lambda o: own.CosineAnnealingWarmupLR(o, 6, 2),
}


def optimizer() -> Optimizer:
    """Two groups with momentum."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]}, {"params": [torch.nn.Parameter(torch.ones(1))]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", MAKE)
def test_no_state_of_a_run_is_refused_and_none_is_changed(kind: str) -> None:
    own = optimizer()
    scheduler = MAKE[kind](own)
    for step in range(6):  # OneCycleLR ends there
        state = copy.deepcopy(scheduler.state_dict())
        other = optimizer()
        fresh = MAKE[kind](other)
        before = repr((fresh.state_dict(), other.param_groups, torch.get_rng_state()))
        assert why_no_step(fresh, state) == "", step
        assert repr((fresh.state_dict(), other.param_groups, torch.get_rng_state())) == before
        assert repr(state) == repr(scheduler.state_dict())
        own.step()
        if step < 5:
            scheduler.step(*[1.0] if kind == "ReduceLROnPlateau" else [])


@pytest.mark.parametrize(
    ("kind", "key", "value", "told"),
    [
        ("StepLR", "step_size", 0, "ZeroDivisionError"),
        ("StepLR", "step_size", -0.0, "ZeroDivisionError"),
        ("StepLR", "step_size", False, "ZeroDivisionError"),
        ("ExponentialLR", "gamma", 1j, "learning rate to a complex"),
        ("CosineAnnealingLR", "T_max", 0, "ZeroDivisionError"),
        ("CyclicLR", "total_size", 0, "ZeroDivisionError"),
        ("SequentialLR", "_schedulers", [{}, {"step_size": 0}], "ZeroDivisionError"),
        ("ReduceLROnPlateau", "best", "many", "TypeError"),
    ],
)
def test_what_the_next_step_would_raise_is_told(kind: str, key: str, value: Any, told: str) -> None:
    scheduler = MAKE[kind](optimizer())
    state = {**copy.deepcopy(scheduler.state_dict()), key: value}
    if kind == "SequentialLR":
        own = scheduler.state_dict()["_schedulers"]
        state["_schedulers"] = [{**one, **more} for one, more in zip(own, value, strict=True)]
        state["last_epoch"] = 2
        state["_schedulers"][1]["last_epoch"] = 1
    assert told in why_no_step(scheduler, state)


def test_functions_and_schedulers_of_the_user_are_not_tried() -> None:
    called: list[int] = []

    class Own(lr_scheduler.LRScheduler):
        def get_lr(self) -> list[Any]:
            called.append(self.last_epoch)
            return [group["lr"] for group in self.optimizer.param_groups]

    def factor(epoch: int) -> float:
        called.append(epoch)
        return 1.0

    for made in (Own(optimizer()), lr_scheduler.LambdaLR(optimizer(), factor)):
        called.clear()
        assert why_no_step(made, copy.deepcopy(made.state_dict())) == "" and called == []


def test_a_file_with_such_a_state_is_refused(tmp_path: Path) -> None:
    own = optimizer()
    scheduler = lr_scheduler.StepLR(own, 3)
    torch.save({**scheduler.state_dict(), "step_size": 0}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match=r"StepLR cannot go on .*ZeroDivisionError.*nothing was loaded"):
        fitting_state(scheduler, tmp_path / "s.pt")
    own.step()
    scheduler.step()
    assert scheduler.step_size == 3


def test_a_complex_number_is_none_of_a_scheduler(tmp_path: Path) -> None:
    scheduler = lr_scheduler.StepLR(optimizer(), 3)  # which would use it in its third step
    torch.save({**scheduler.state_dict(), "gamma": 1j}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match=r"'gamma' is not what StepLR has \(complex 1j where the run has float 0.1\)"):
        fitting_state(scheduler, tmp_path / "s.pt")
