"""What ``accumulate`` of accelerate counts where a backward pass fails: all passes of the step are made again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from huggingface_setup import RANKS, launched
from sets import campaign, full
from torch import Tensor, nn

from shardwise.plan import Plan, replicated, zero
from shardwise.testing import assert_close, run_ranks

pytest.importorskip("accelerate")

PASSES, RATE = 3, 0.5
PLANS: dict[str, Plan] = {"ddp": replicated(), "zero2": zero(2), "zero3": zero(3)}


def net() -> nn.Module:
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


def batch(number: int) -> Tensor:
    return torch.full((1, 4), float(number))


def passes(plan: Plan, failing: int, drops: bool) -> tuple[list[bool], dict[str, Tensor]]:
    """Of two steps, in the first of which pass ``failing`` fails: whether each pass that did not was the last."""
    from shardwise.huggingface import ShardwiseAccelerator

    def fail(grad: Tensor) -> None:
        raise MemoryError("this pass")

    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = ShardwiseAccelerator(plan=plan, cpu=True, gradient_accumulation_steps=PASSES)
        plain = net()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=RATE))
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
        accelerator.close()
    return synced, state


def row(name: str, failing: int, drops: bool) -> Any:
    return pytest.param(name, failing, drops, id=f"{name}-{failing}-{'drops' if drops else 'goes on'}")


QUICK = [("ddp", 0), ("zero2", 2), ("zero3", 1)]
EVERY = [(name, failing, (place + failing) % 2 == 1) for place, name in enumerate(PLANS) for failing in range(PASSES)]
"""Every plan with every pass; what the program does then takes turns."""


@pytest.mark.parametrize(
    ("name", "failing", "drops"),
    [
        *(row(*each) for each in EVERY if each[:2] in QUICK),
        *full(*(row(*each) for each in EVERY if each[:2] not in QUICK)),
        *campaign(*(row(name, failing, not drops) for name, failing, drops in EVERY)),
    ],
)
def test_a_pass_that_failed_is_of_no_update(name: str, failing: int, drops: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(2 * PASSES):
        (model(batch(number)).sum() / PASSES).backward()
        if (number + 1) % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()
    last = [False] * (PASSES - 1) + [True]
    found = run_ranks(RANKS, passes, PLANS[name], failing, drops)
    assert [synced for synced, _ in found] == [[False] * failing + 2 * last] * RANKS
    assert_close(found[0][1], model.state_dict(), 1e-6, name)
