"""Tests of the gradient norm, the clip factor, and the loss scaler.

``global_norm``, ``each_norm``, ``LateNorm`` and ``clip_factor`` match torch, also with NaN and infinity. ``LossScaler``
follows its documented rule, bounds and state.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.comm import NO_MODEL, LocalGroup, ModelId
from shardwise.core.grads import norm as norms
from shardwise.core.grads.norm import LateNorm, clip_factor, each_norm, global_norm
from shardwise.core.grads.scaler import LossScaler
from shardwise.plan import ScalerPlan
from tests.support.engine_setup import scaler
from tests.support.on_ranks import raises

NAN, INF = math.nan, math.inf
P = [1.0, 2.0, 3.0, 0.5, INF]


class Ranks(LocalGroup):
    """A group whose other ranks post the given values, followed by this rank's own ones."""

    def __init__(self, *others: list[float]) -> None:
        super().__init__("ranks", torch.device("cpu"))
        self.others = others

    def exchange(self, values: Sequence[float], purpose: str = "", model_id: ModelId = NO_MODEL) -> list[list[float]]:
        own = [float(value) for value in values]
        return [own, *(other + own[len(other) :] for other in self.others)]


ALONE = Ranks()


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch(p: float, dtype: torch.dtype) -> None:
    tensors = [torch.randn(n, dtype=torch.float64).to(dtype) for n in (1, 7, 300)]
    wide = [t.double() for t in tensors]
    expected = float(torch.nn.utils.get_total_norm(wide, p))
    assert global_norm(tensors, p, ALONE, 1.0) == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-5)


def share(value: Tensor, p: float) -> float:
    """Return what a rank posts for its shard."""
    norm = float(torch.linalg.vector_norm(value.double(), p))
    return norm if p == INF else norm**p


@pytest.mark.parametrize("p", P)
def test_norm_of_several_ranks(p: float) -> None:
    whole = torch.randn(12, dtype=torch.float64)
    parts = whole.split(4)
    ranks = Ranks(*([share(each, p)] for each in parts[1:]))
    expected = float(torch.linalg.vector_norm(whole, p))
    assert global_norm([parts[0]], p, ranks, 1.0) == pytest.approx(expected, rel=1e-12)
    assert global_norm([parts[0]], p, ranks, 0.125) == pytest.approx(expected / 8, rel=1e-12)


def test_norm_of_fp16_does_not_overflow() -> None:
    large = torch.full((10000,), 60000.0, dtype=torch.float16)
    assert global_norm([large], 2.0, ALONE, 1.0) == pytest.approx(6e6, rel=1e-5)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_norm_with_nan_and_infinity(p: float, where: int) -> None:
    for bad, is_it in ((NAN, math.isnan), (INF, math.isinf), (-INF, math.isinf)):
        tensors: list[Tensor] = [torch.ones(3) for _ in range(3)]
        tensors[where][where] = bad
        assert is_it(global_norm(tensors, p, ALONE, 1.0))


@given(st.floats(0, 1e10), st.floats(1e-6, 1e6))
def test_clip_factor_matches_torch(norm: float, max_norm: float) -> None:
    gradient = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    gradient.grad = torch.tensor([norm], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([gradient], max_norm)
    assert norm * clip_factor(norm, max_norm) == pytest.approx(float(gradient.grad), rel=1e-12, abs=1e-300)


def test_clip_factor_edges() -> None:
    assert clip_factor(5.0, 0.0) == 1.0 and clip_factor(NAN, 0.0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0 and clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(INF, 1.0) == 0.0
    # NaN must stay visible: a factor of 1 would hide it, and 0 would not make the gradients finite.
    assert math.isnan(clip_factor(NAN, 1.0))


@pytest.mark.parametrize("p", P)
def test_each_norm(p: float) -> None:
    """Sharded tensors, tensors that no rank has, and overflowing powers; replicated tensors count once."""
    generator = torch.Generator().manual_seed(2)
    first, theirs = (torch.randn(numel, generator=generator) for numel in (5, 4))
    huge = torch.full((3,), 1e30)
    mine = [first, None, huge, torch.empty(0, dtype=torch.bfloat16)]
    whole = [torch.cat([first, theirs]), torch.zeros(1), torch.cat([huge, huge]), torch.zeros(1)]
    expected = [float(torch.linalg.vector_norm(each.double(), p)) for each in whole]
    peers = Ranks([share(theirs, p), 0.0, share(huge, p), 0.0])
    assert each_norm(mine, p, peers, None, [False] * 4) == pytest.approx(expected, rel=1e-5)
    # Model-parallel ranks have another shard of a sharded parameter, and the same values of a replicated one.
    parts = Ranks([share(each, p) for each in whole])
    twice = [float(torch.linalg.vector_norm(torch.cat([each, each]).double(), p)) for each in whole]
    divided = [True, False, False, False]
    found = each_norm(mine, p, peers, parts, divided)
    assert found == pytest.approx([twice[0], *expected[1:]], rel=1e-5)


class Longest(TorchDispatchMode):
    """Record the lengths of the tensors whose norms are computed with a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._foreach_norm.Scalar:
            tensors, _, dtype = args
            self.numels += [each.numel() for each in tensors if each.dtype != dtype]
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_late_norm_is_computed_in_parts(p: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is computed in fp64, also if powers overflow in fp32, and large shards are cast in parts."""
    monkeypatch.setattr(norms, "PART", 64)
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 1e30):
        tensors = [(torch.randn(n, generator=generator) * scale).to(dtype) for n in (1, 64, 0, 129, 300)]
        with Longest() as longest:
            read = LateNorm(ALONE).note(tensors, p, 0.5)
        expected = float(torch.linalg.vector_norm(torch.cat(tensors).double(), p)) * 0.5
        assert read() == pytest.approx(expected, rel=1e-12)
        assert read() == LateNorm(ALONE).note(tensors, p, 0.5)()
        assert max(longest.numels, default=0) <= 64
        assert longest.numels or dtype == torch.float64


def plan(**changes: float) -> ScalerPlan:
    return scaler(**({"growth_interval": 4, "hysteresis": 2} | changes))


def scales(scaler: LossScaler, overflows: Sequence[int]) -> list[float]:
    found = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize("window", [1, 2, 3])
def test_growth_delay(window: int) -> None:
    """DeepSpeed's rule counts iterations since the last overflow; the first growth needs one more than a window."""
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
    """Compute the scales as the documentation of the scaler states them."""
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
def test_scale_follows_the_rule(overflows: list[int], hysteresis: int, interval: int) -> None:
    p = plan(hysteresis=hysteresis, growth_interval=interval, min_scale=256.0, max_scale=4096.0)
    assert scales(LossScaler(p), overflows) == model(overflows, p)


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30))
def test_restored_scaler_continues(before: list[int], after: list[int]) -> None:
    first, second = LossScaler(plan()), LossScaler(plan(initial_scale=2.0))
    scales(first, before)
    second.load_state_dict(first.state_dict())
    assert scales(first, after) == scales(second, after)


def test_invalid_scaler_states() -> None:
    scaler = LossScaler(plan())
    state = scaler.state_dict()
    for bad in (0.0, -4.0, float("nan")):
        raises(ValueError, f"loss scale {bad}", scaler.load_state_dict, state | {"scale": bad})
    raises(KeyError, "overflows", scaler.load_state_dict, {"scale": 8.0, "good_steps": 0.0})
    assert scaler.state_dict() == state
