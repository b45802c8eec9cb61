"""The Adam family as any torch optimizer: schedulers, scalers, names, options of groups, states from elsewhere."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_setup import KINDS, Kind, assert_close, make_params, set_gradients
from torch import Tensor, nn

from shardwise.core.optim import AdamTiles, HybridAdam


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


def test_options_that_choose_a_kernel_change_nothing() -> None:
    plain, chosen = make_params(torch.float32), make_params(torch.float32)
    ours, others = HybridAdam(plain), HybridAdam([{"params": chosen, "foreach": True, "fused": False}])
    for step in range(2):
        set_gradients(plain, step)
        set_gradients(chosen, step)
        ours.step()
        others.step()
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(plain, chosen, strict=True))


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


def test_parameters_with_names() -> None:
    models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    own = HybridAdam(models[0].named_parameters(), weight_decay=0.01)
    reference = torch.optim.AdamW(models[1].named_parameters())
    for step in range(3):
        for model in models:
            set_gradients(list(model.parameters()), step)
        own.step()
        reference.step()
    assert own.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert_close(list(models[0].parameters()), list(models[1].parameters()), 1e-6)
    reference.load_state_dict(own.state_dict())
    own.load_state_dict(reference.state_dict())


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


def test_step_counts_are_counted_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernel refuses to add what is on another device. Meta tensors stand for those on a GPU here."""
    params = [nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "meta", "cpu")]
    real, devices = torch._foreach_add_, []

    def add(counts: list[Tensor], one: Tensor, *, alpha: float) -> None:
        assert {count.device for count in counts} == {one.device}
        devices.append(one.device.type)
        real(counts, one, alpha=alpha)

    monkeypatch.setattr(torch, "_foreach_add_", add)
    monkeypatch.setattr(AdamTiles, "update", lambda *_: None)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = HybridAdam(params)
    for _ in range(2):
        optimizer.step()
    assert devices == ["cpu", "meta"] * 2
    assert [optimizer.state[param]["step"].item() for param in (params[0], params[2])] == [2.0, 2.0]
