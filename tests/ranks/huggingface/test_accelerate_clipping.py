"""Clipping by accelerate's methods of several sharded models together, against plain PyTorch in one process.

In fp32: norms and weights agree within 1e-5 (relative to each tensor's largest element), since sums over a batch are
made in another order.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.plan import Plan, replicated, zero
from shardwise.testing import assert_close
from tests.support.huggingface_setup import RANKS, launched
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

pytest.importorskip("accelerate")

RTOL = 1e-5
PLANS: dict[str, Plan] = {"ddp": replicated(), "zero1": zero(1), "zero3": zero(3)}


@functools.cache
def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(24, 3, generator=generator)
    return list(zip(inputs, inputs.prod(1, keepdim=True), strict=True))


CLIPS: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
    "norm": lambda of, params: of.clip_grad_norm_(params, 0.05),
    "largest": lambda of, params: of.clip_grad_norm_(params, 0.01, math.inf),
    "value": lambda of, params: of.clip_grad_value_(params, 0.004),
    "a part": lambda of, params: of.clip_grad_norm_(params[1:4], 0.01),
}


def pair() -> tuple[nn.Module, nn.Module, nn.Parameter]:
    """Two models, one behind the other, and a parameter of neither."""
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return first, second, nn.Parameter(torch.tensor(0.5))


def train_pair(of: Any, clip: str, rank: int, ranks: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """``of`` is an accelerator, or ``torch.nn.utils``, whose functions have the same names."""
    first, second, factor = pair()
    steps = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (first, second)]
    steps.append(torch.optim.SGD([factor], lr=0.5))
    if ranks > 1:
        first, steps[0], second, steps[1] = of.prepare(first, steps[0], second, steps[1])
    norms = []
    for step in range(3):
        mine = points()[8 * step : 8 * step + 8][rank::ranks]
        inputs, targets = (torch.stack(each) for each in zip(*mine, strict=True))
        loss = nn.functional.mse_loss(second(first(inputs)) * factor, targets)
        of.backward(loss) if ranks > 1 else loss.backward()
        if ranks > 1:
            dist.all_reduce(factor.grad)
            factor.grad /= ranks
        found = CLIPS[clip](of, [*first.parameters(), *second.parameters(), factor])
        norms.append(0.0 if found is None else float(found))
        for each in steps:
            each.step()
            each.zero_grad()
    return [dict(first.state_dict()), dict(second.state_dict()), {"factor": factor.detach()}], norms


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize("name", [*full("ddp", "zero1"), "zero3"])
def test_parameters_of_several_models_are_clipped_together(name: str) -> None:
    from shardwise.huggingface import ShardwiseAccelerator

    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for clip in CLIPS:
            expected, expected_norms = train_pair(nn.utils, clip, 0, 1)
            limit = {"norm": 0.05, "largest": 0.01, "a part": 0.01}.get(clip, -1.0)
            assert min(expected_norms) > limit
            accelerator = ShardwiseAccelerator(plan=PLANS[name], cpu=True)
            states, norms = train_pair(accelerator, clip, dist.get_rank(), RANKS)
            accelerator.close()
            assert norms == pytest.approx(expected_norms, rel=RTOL), clip
            for state, wanted in zip(states, expected, strict=True):
                assert_close(state, wanted, RTOL, clip)
