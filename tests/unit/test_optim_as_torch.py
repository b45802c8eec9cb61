"""The Adam family as any torch optimizer: schedulers, scalers, names, options of groups, states from elsewhere."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_setup import KINDS, Kind, assert_close, make_params, set_gradients
from torch import Tensor

from shardwise.core.optim import HybridAdam


def test_a_state_of_the_other_weight_decay_is_said_once() -> None:
    """torch's groups say how weight decay was made; here the argument does, so a difference is not passed over."""
    params = make_params(torch.float32)
    set_gradients(params, 0)
    states = {}
    for decay in (0.1, 0.0):
        theirs = torch.optim.Adam(params, weight_decay=decay)
        theirs.step()
        states[decay] = theirs.state_dict()
    ours = HybridAdam(params)
    said = r"decoupled_weight_decay=False and weight_decay=\[0\.1\].*adamw_mode=True"
    with pytest.warns(UserWarning, match=said) as seen:
        ours.load_state_dict(states[0.1])
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.load_state_dict(ours.state_dict())
        ours.load_state_dict(states[0.0])
        HybridAdam(params, adamw_mode=False).load_state_dict(states[0.1])
    assert "decoupled_weight_decay" in states[0.1]["param_groups"][0]
    back = torch.optim.Adam(params)
    back.load_state_dict(HybridAdam(params).state_dict() | {"state": {}})
    assert back.param_groups[0]["decoupled_weight_decay"] is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_would_change_the_step_are_refused(kind: Kind, option: str) -> None:
    first, second = make_params(torch.float32, [(2,), (3,)])
    with pytest.raises(ValueError, match=f"{option}=True in a group of {kind.__name__}"):
        kind([{"params": [first], option: True}])
    optimizer = kind([{"params": [first], option: False}])
    with pytest.raises(ValueError, match=f"{option}=True"):
        optimizer.add_param_group({"params": [second], option: True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="nothing_like_this"):
        kind([first], nothing_like_this=True)


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)  # moves the first beta as well


def _warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)


@pytest.mark.parametrize("scheduler", [_one_cycle, _warm_up])
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_and_tensors_as_learning_rates(kind: Kind, tensor: bool, scheduler: Callable[..., Any]) -> None:
    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    rates = [torch.tensor(0.05) if tensor else 0.05 for _ in range(2)]
    own, reference = kind(ours, lr=rates[0]), torch.optim.AdamW(theirs, lr=rates[1], weight_decay=0, foreach=False)
    schedulers = [scheduler(own), scheduler(reference)]
    used = set()
    for step in range(12):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        own.step()
        reference.step()
        for each in schedulers:
            each.step()
        used.add(float(own.param_groups[0]["lr"]))
        assert float(own.param_groups[0]["lr"]) == float(reference.param_groups[0]["lr"])
    assert len(used) > 3 and isinstance(own.param_groups[0]["lr"], Tensor) == tensor
    assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_under_torchs_gradient_scaler(kind: Kind) -> None:
    """A gradient that is not finite skips the step; otherwise it is unscaled first."""
    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    own, reference = kind(ours), torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(3):
        for params, optimizer, scaler in ((ours, own, scalers[0]), (theirs, reference, scalers[1])):
            optimizer.zero_grad()
            loss = sum((param.square().sum() for param in params), start=torch.zeros(()))
            scaler.scale(loss * math.inf if step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    assert own.state[ours[0]]["step"] == 2
    assert_close(ours, theirs, 1e-6)
