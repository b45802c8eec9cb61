"""ColossalAI's learning-rate schedulers: their rates are the formulas', at every step, and after any resumption."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as plain

from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.core.checkpoint import write_lr_scheduler
from shardwise.core.checkpoint.schedulers import SavedScheduler, fitting_state
from shardwise.nn import lr_scheduler as own
from tests.support.sets import full

TOTAL, WARM, STEPS = 20, 4, 26
RATES = (0.1, 0.03)


def _warm(then: Callable[[int, float], float], steps: int = WARM) -> Callable[[int, float], float]:
    return lambda n, lr: (n + 1) / steps * lr if n < steps else then(n - steps, lr)


def _cosine(steps: int, low: float = 0.0) -> Callable[[int, float], float]:
    return lambda n, lr: low + (lr - low) * (1 + math.cos(math.pi * n / steps)) / 2


def _flat(steps: int, then: Callable[[int, float], float]) -> Callable[[int, float], float]:
    return lambda n, lr: lr if n < steps else then(n - steps, lr)


def _power(steps: int, low: float, power: float = 1.0) -> Callable[[int, float], float]:
    return lambda n, lr: low + (lr - low) * (1 - min(n, steps) / steps) ** power


def _linear(n: int, lr: float) -> float:
    return (n + 1) / (WARM + 1) * lr if n < WARM else max(0, TOTAL - n) / (TOTAL - WARM) * lr


CASES: dict[str, tuple[str, dict[str, Any], Callable[[int, float], float]]] = {
    "cosine": ("CosineAnnealingLR", {"eta_min": 0.01}, _cosine(TOTAL, 0.01)),
    "cosine, warm": ("CosineAnnealingWarmupLR", {"warmup_steps": WARM}, _warm(_cosine(TOTAL - WARM))),
    "cosine, not warm": ("CosineAnnealingWarmupLR", {"eta_min": 0.001}, _cosine(TOTAL, 0.001)),
    "cosine of one step": ("CosineAnnealingWarmupLR", {"warmup_steps": TOTAL - 1}, _warm(_cosine(1), TOTAL - 1)),
    "flat": ("FlatAnnealingLR", {}, _flat(14, _cosine(6))),
    "flat, to a floor": ("FlatAnnealingLR", {"pct_start": 0.5, "eta_min": 0.01}, _flat(10, _cosine(10, 0.01))),
    "flat, warm": (
        "FlatAnnealingWarmupLR",
        {"warmup_steps": WARM, "pct_start": 0.5, "eta_min": 0.002},
        _warm(_flat(8, _cosine(8, 0.002))),
    ),
    "linear": ("LinearWarmupLR", {"warmup_steps": WARM}, _linear),
    "steps": ("MultiStepLR", {"milestones": [5, 9]}, lambda n, lr: lr * 0.1 ** ((n >= 5) + (n >= 9))),
    "steps, warm": (
        "MultiStepWarmupLR",
        {"warmup_steps": WARM, "milestones": [WARM, 9], "gamma": 0.5},
        _warm(lambda n, lr: lr * 0.5 ** ((n >= 0) + (n >= 9 - WARM))),
    ),
    "power": ("PolynomialLR", {"power": 2.0}, _power(TOTAL, 0.0001, 2.0)),
    "power, warm": ("PolynomialWarmupLR", {"warmup_steps": WARM}, _warm(_power(TOTAL - WARM, 0.0001))),
    "function": ("LambdaLR", {"lr_lambda": lambda n: 1 / (n + 1)}, lambda n, lr: lr / (n + 1)),
    "factors": ("MultiplicativeLR", {"lr_lambda": lambda n: 0.9}, lambda n, lr: lr * 0.9**n),
    "every third": ("StepLR", {"step_size": 3}, lambda n, lr: lr * 0.1 ** (n // 3)),
    "exponential": ("ExponentialLR", {"gamma": 0.8}, lambda n, lr: lr * 0.8**n),
}


def optimizer() -> torch.optim.Optimizer:
    """Two groups with momentum and rates of their own."""
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in RATES]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def _make(case: str, of: torch.optim.Optimizer, **more: Any) -> Any:
    name, arguments, _ = CASES[case]
    return getattr(own, name)(of, TOTAL, **arguments, **more)


def _rates(of: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in of.param_groups]


def _walk(of: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        of.step()
        scheduler.step()
        found.append(_rates(of))
        assert scheduler.get_last_lr() == found[-1]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error")
def test_rates_are_the_formulas(case: str) -> None:
    one = optimizer()
    scheduler = _make(case, one)
    walked = [_rates(one), *_walk(one, scheduler, STEPS)]
    expected = [[CASES[case][2](n, lr) for lr in RATES] for n in range(STEPS + 1)]
    torch.testing.assert_close(torch.tensor(walked), torch.tensor(expected), rtol=1e-11, atol=1e-13)


def test_one_cycle_has_its_peak_at_the_optimizers_rate() -> None:
    one, other = optimizer(), optimizer()
    ours = own.OneCycleLR(one, TOTAL, pct_start=0.4, three_phase=True)
    theirs = plain.OneCycleLR(other, list(RATES), total_steps=TOTAL, pct_start=0.4, three_phase=True)
    assert _walk(one, ours, TOTAL - 1) == _walk(other, theirs, TOTAL - 1)
    again = optimizer()  # a run that goes on takes its peak from the group, not from the rate of that moment
    first = own.OneCycleLR(again, TOTAL, pct_start=0.4, three_phase=True)
    _walk(again, first, 3)
    later = own.OneCycleLR(again, TOTAL, pct_start=0.4, three_phase=True, last_epoch=2)
    assert _walk(again, later, 4) == _tail_of_one_cycle(3, 4)


def _tail_of_one_cycle(start: int, steps: int) -> list[list[float]]:
    of = optimizer()
    scheduler = own.OneCycleLR(of, TOTAL, pct_start=0.4, three_phase=True)
    return _walk(of, scheduler, start + steps)[start:]


OF_A_KIND = ("cosine, not warm", "cosine of one step", "flat, to a floor", "power, warm", "factors", "exponential")
"""Others of the same class, or computed in the same way, are in the quick set."""


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in OF_A_KIND), *full(*OF_A_KIND)])
def test_a_state_resumes_exactly_from_every_step(case: str, tmp_path: Path) -> None:
    one = optimizer()
    scheduler = _make(case, one)
    for _ in range(12):
        path = tmp_path / "scheduler.json"
        write_lr_scheduler(scheduler, path)
        fresh = optimizer()
        resumed = _make(case, fresh)
        state = fitting_state(resumed, path)
        fresh.load_state_dict(copy.deepcopy(one.state_dict()))
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        walked = _walk(fresh, resumed, 9)
        other = optimizer()
        straight = _walk(other, _make(case, other), scheduler.last_epoch + 9)[-9:]
        assert walked == straight
        _walk(one, scheduler, 1)


# torch's StepLR, resumed by last_epoch at a step of its own, takes that step twice.
@pytest.mark.parametrize("case", [case for case in CASES if case != "every third"])
def test_last_epoch_goes_on_where_it_says(case: str) -> None:
    for last in (0, 2, 3, 7, 15):
        one = optimizer()
        _walk(one, _make(case, one), last)
        again = _make(case, one, last_epoch=last - 1)
        other = optimizer()
        straight = _walk(other, _make(case, other), last + 6)[-6:]
        torch.testing.assert_close(torch.tensor(_walk(one, again, 6)), torch.tensor(straight), rtol=1e-9, atol=1e-12)
    untouched = optimizer()
    with pytest.raises(KeyError, match="initial_lr"):
        _make(case, untouched, last_epoch=2)


def test_a_state_of_colossalais_goes_on() -> None:
    """Its ``last_epoch`` stands still once the warm-up is over, and the second scheduler counts."""
    for steps in (2, 9):
        one = optimizer()
        scheduler = _make("power, warm", one)
        _walk(one, scheduler, steps)
        state = {key: value for key, value in scheduler.state_dict().items() if key in ("base_lrs", "_last_lr")}
        second = {"last_epoch": max(0, steps - WARM), "power": 1.0}
        state |= {"last_epoch": min(steps, WARM), "finished": steps > WARM, "warmup_epochs": WARM}
        state |= {"after_scheduler_type": "PolynomialLR", "after_scheduler_dict": second}
        fresh = optimizer()
        resumed = _make("power, warm", fresh)
        assert SavedScheduler(state).misfit(resumed) is None
        fresh.load_state_dict(one.state_dict())
        resumed.load_state_dict(state)
        assert resumed.last_epoch == steps
        assert _walk(fresh, resumed, 3) == _walk(one, scheduler, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("CosineAnnealingLR", {"total_steps": 0}, "total_steps=0"),
        ("CosineAnnealingWarmupLR", {"warmup_steps": TOTAL}, "after the warm-up"),
        ("PolynomialWarmupLR", {"warmup_steps": -1}, "warmup_steps=-1"),
        ("FlatAnnealingLR", {"pct_start": 72}, "pct_start=72"),
        ("MultiStepLR", {}, "milestones=None"),
        ("LambdaLR", {}, "lr_lambda=None"),
    ],
)
def test_arguments_that_make_no_schedule(name: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        getattr(own, name)(optimizer(), **{"total_steps": TOTAL, **arguments})
    with pytest.raises(TypeError, match="num_steps_per_epoch"):
        getattr(own, name)(optimizer(), **{"total_steps": TOTAL, **arguments}, num_steps_per_epoch=5)


def test_under_a_booster_and_through_its_checkpoint(tmp_path: Path) -> None:
    def boosted() -> tuple[Booster, Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.03}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = own.CosineAnnealingWarmupLR(optimizer, TOTAL, WARM)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
        model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
        return booster, model, optimizer, scheduler

    def steps(booster: Booster, model: Any, optimizer: Any, scheduler: Any, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            booster.backward(model(torch.ones(2, 3)).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates += [group["lr"] for group in optimizer.param_groups]
        return rates

    run = boosted()
    for at in (2, 7):  # before and after the second stage has begun
        steps(*run, at - run[3].last_epoch)
        run[0].save_checkpoint(tmp_path, *run[1:], tag=f"step-{at}")
    expected = steps(*run, 5)
    for at in (7, 2):
        again = boosted()
        again[0].load_checkpoint(tmp_path, *again[1:], tag=f"step-{at}")
        assert steps(*again, 12 - at)[-10:] == expected
