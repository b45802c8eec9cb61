"""The loss scale on its own: sequences, bounds, and its state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.grads.scaler import LossScaler
from shardwise.plan import ScalerPlan
from tests.support.engine_setup import scaler


def plan(**changes: float) -> ScalerPlan:
    return scaler(**({"growth_interval": 4, "hysteresis": 2} | changes))


def scales(scaler: LossScaler, overflows: Sequence[int]) -> list[float]:
    found = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_delay_counts_from_the_beginning_and_from_each_overflow(window: int) -> None:
    """DeepSpeed's rule: iterations since the last overflow, of which a whole window and one more are the first."""
    overflows = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    scale, last, wanted = 1024.0, -1, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            scale, last = scale / 2, iteration
        else:
            since = iteration - last - 1
            scale *= 2 if since > 0 and since % window == 0 else 1
        wanted.append(scale)
    assert scales(LossScaler(plan(growth_interval=window, hysteresis=1, growth_delay=1)), overflows) == wanted
    assert scales(LossScaler(plan(growth_interval=window, hysteresis=1)), overflows) != wanted


def model(overflows: Sequence[int], p: ScalerPlan) -> list[float]:
    """The contract in words, restated."""
    scale, hysteresis, growth, found = p.initial_scale, 0, 0, []
    for overflow in overflows:
        if overflow:
            hysteresis, growth = hysteresis + 1, 0
            if hysteresis >= p.hysteresis:
                scale = max(p.min_scale, scale * p.backoff_factor)
        else:
            growth += 1
            if growth == p.growth_interval:
                hysteresis, growth = 0, 0
                scale = min(p.max_scale, scale * p.growth_factor)
        found.append(scale)
    return found


@given(st.lists(st.integers(0, 1), max_size=60), st.integers(0, 4), st.integers(1, 5))
def test_any_sequence(overflows: list[int], hysteresis: int, interval: int) -> None:
    p = plan(hysteresis=hysteresis, growth_interval=interval, min_scale=256.0, max_scale=4096.0)
    assert scales(LossScaler(p), overflows) == model(overflows, p)


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30))
def test_a_restored_scaler_goes_on_as_the_first(before: list[int], after: list[int]) -> None:
    first, second = LossScaler(plan()), LossScaler(plan(initial_scale=2.0))
    scales(first, before)
    second.load_state_dict(first.state_dict())
    assert scales(first, after) == scales(second, after)


def test_damaged_states_are_refused() -> None:
    scaler = LossScaler(plan())
    state = scaler.state_dict()
    for bad in (0.0, -4.0, float("nan")):
        with pytest.raises(ValueError, match=f"loss scale {bad}"):
            scaler.load_state_dict(state | {"scale": bad})
    with pytest.raises(KeyError, match="overflows"):
        scaler.load_state_dict({"scale": 8.0, "good_steps": 0.0})
    assert scaler.state_dict() == state
