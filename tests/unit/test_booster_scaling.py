"""The loss scale of ``Booster(mixed_precision="fp16")``: which gradients it is taken out of, and when it moves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardwise.booster import Booster, FP16TorchMixedPrecision


def parts() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fp16_steps(growth_interval: int, steps: int = 6) -> list[float]:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    booster = Booster(mixed_precision=FP16TorchMixedPrecision(init_scale=8.0, growth_interval=growth_interval))
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    updates = []
    for _ in range(steps):
        before = model.weight.detach().clone()
        booster.backward(boosted(torch.ones(1, 3)).sum(), wrapped)
        assert wrapped.clip_grad_by_norm(1e9) == pytest.approx(math.sqrt(3))  # defect 11: the true norm
        assert wrapped.get_grad_norm() == pytest.approx(math.sqrt(3))
        wrapped.step()
        wrapped.zero_grad()
        updates.append(float((model.weight.detach() - before).norm()))
    return updates


def test_defect_1_scaler_changes_after_unscaling() -> None:
    assert fp16_steps(growth_interval=2) == pytest.approx([math.sqrt(3)] * 6)


def test_fp16_skips_a_step_that_is_not_finite() -> None:
    model, optimizer = parts()
    boosted, wrapped, *_ = Booster(mixed_precision="fp16").boost(model, optimizer)
    before = model.weight.detach().clone()
    wrapped.backward(boosted(torch.full((1, 4), 1e4)).sum() * 1e4)
    wrapped.step()
    assert wrapped.last_step_skipped and torch.equal(model.weight, before)
    assert wrapped.scaler.get_scale() == 2.0**15
    with pytest.raises(ValueError, match="closure"):
        wrapped.step(lambda: 0.0)


def spiking(dropped: str) -> tuple[list[float], float]:
    """Elements of the gradient in steps of a program that leaves some out, and the scale behind them."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    precision = FP16TorchMixedPrecision(init_scale=2.0**10, growth_interval=1000)
    booster = Booster(mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    seen = []
    for size in (1.0, 20.0, 2.0, 1e4, 3.0, 0.5):
        booster.backward(boosted(torch.full((1, 2), size)).sum() * (1e4 if size == 1e4 else 1.0), wrapped)
        norm = wrapped.clip_grad_by_norm(1e9)
        if not norm < 25.0:
            to_zero = dropped == "model, to zero"
            (wrapped if dropped == "optimizer" else model).zero_grad(set_to_none=not to_zero)
            continue
        assert model.weight.grad is not None
        seen += model.weight.grad[0].tolist()
        wrapped.step()
        assert not wrapped.last_step_skipped
        wrapped.zero_grad()
    return seen, wrapped.scaler.get_scale()


@pytest.mark.parametrize("dropped", ["optimizer", "model", "model, to zero"])
def test_fp16_gradients_that_are_left_out_behind_clipping(dropped: str) -> None:
    # One overflow: whoever leaves that out has the scale fall, too.
    assert spiking(dropped) == ([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 0.5, 0.5], 2.0**9)
