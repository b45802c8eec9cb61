"""What ``accumulate`` of accelerate counts where a backward pass fails: all passes of the step are made again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan, replicated, zero
from shardwise.testing import assert_close
from tests.support.huggingface_setup import RANKS, launched
from tests.support.on_ranks import on_ranks
from tests.support.sets import campaign, full

pytest.importorskip("accelerate")

PASSES, RATE = 3, 0.5
PLANS: dict[str, Plan] = {"ddp": replicated(), "zero2": zero(2), "zero3": zero(3)}


def net() -> nn.Module:
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


def batch(number: int) -> Tensor:
    return torch.full((1, 4), float(number))


def row(name: str, failing: int, drops: bool) -> Any:
    return pytest.param(name, failing, drops, id=f"{name}-{failing}-{'drops' if drops else 'goes on'}")


QUICK = [("ddp", 0), ("zero2", 2), ("zero3", 1)]
EVERY = [(name, failing, (place + failing) % 2 == 1) for place, name in enumerate(PLANS) for failing in range(PASSES)]
"""Every plan with every pass; what the program does then takes turns."""


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("name", "failing", "drops"),
    [
        *(row(*each) for each in EVERY if each[:2] in QUICK),
        *full(*(row(*each) for each in EVERY if each[:2] not in QUICK)),
        *campaign(*(row(name, failing, not drops) for name, failing, drops in EVERY)),
    ],
)
def test_a_pass_that_failed_is_of_no_update(name: str, failing: int, drops: bool) -> None:
    """Of two steps, in the first of which pass ``failing`` fails."""
    from shardwise.huggingface import ShardwiseAccelerator

    def fail(grad: Tensor) -> None:
        raise MemoryError("this pass")

    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = ShardwiseAccelerator(plan=PLANS[name], cpu=True, gradient_accumulation_steps=PASSES)
        own = net()
        model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=RATE))
        synced = []

        def one(number: int, fails: bool) -> None:
            with accelerator.accumulate(model):
                out = model(batch(number))
                if fails:
                    out.register_hook(fail)
                accelerator.backward(out.sum())
                synced.append(accelerator.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()

        for number in range(failing):
            one(number, False)
        with pytest.raises(MemoryError):
            one(failing, True)
        if drops:
            model.zero_grad()
        for number in range(2 * PASSES):
            one(number, False)
        state = accelerator.get_state_dict(model)
        main = accelerator.is_main_process
        accelerator.close()
    last = [False] * (PASSES - 1) + [True]
    assert synced == [False] * failing + 2 * last
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), lr=RATE)
    for number in range(2 * PASSES):
        (plain(batch(number)).sum() / PASSES).backward()
        if last[number % PASSES]:
            sgd.step()
            sgd.zero_grad()
    if main:
        assert_close(state, plain.state_dict(), 1e-6, name)
