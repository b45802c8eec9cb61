"""Rounds of ``ShardedGradScaler`` that an exception or Ctrl-C ends early: steps are plain PyTorch's, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interrupts import Interrupts
from shardwise.fairscale.nn import FullyShardedDataParallel as FSDP
from torch import nn

from shardwise.engine import norms, visible_grads
from shardwise.fairscale import grad_scaler
from shardwise.fairscale.grad_scaler import ShardedGradScaler
from shardwise.testing import run_ranks

SCALE = 1024.0


class Rounds:
    """SGD with a rate of 1, and gradients of 1: each step changes the weight by -1, in numbers without rounding."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = FSDP(nn.Linear(4, 1, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scaler = ShardedGradScaler(init_scale=SCALE)
        self.passes()
        with torch.no_grad():
            self.model.load_state_dict({"weight": torch.zeros(1, 4)})
        self.optimizer.zero_grad()

    def passes(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.full((1, 4), factor)).sum()).backward()

    def round(self) -> None:
        self.passes()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def check(self, steps: int) -> None:
        assert torch.equal(self.model.state_dict()["weight"], torch.full((1, 4), -float(steps)))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Steps raise before they change anything."""

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = self.optimizer.register_step_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            yield
        hook.remove()


def left_early() -> None:
    each = Rounds()
    each.round()
    each.check(1)
    each.passes()
    with each.failing():
        each.scaler.step(each.optimizer)  # unscaled, and then an exception
    each.round()
    each.check(2)
    each.passes()
    each.scaler.unscale_(each.optimizer)
    each.optimizer.zero_grad()  # these gradients are of no step
    each.round()
    each.check(3)
    each.passes()
    with each.failing():
        each.scaler.step(each.optimizer)
    each.scaler.step(each.optimizer)  # the same gradients again, which are unscaled
    each.check(4)
    each.passes()
    with pytest.raises(RuntimeError, match=r"step\(SGD\) for the second time since the last update"):
        each.scaler.step(each.optimizer)  # there was none
    with pytest.raises(RuntimeError, match=r"unscale_\(SGD\) for the second time since the last update"):
        each.scaler.unscale_(each.optimizer)
    each.scaler.update()
    each.scaler.step(each.optimizer)
    each.scaler.update()
    each.check(5)
    each.passes(float("inf"))
    each.scaler.step(each.optimizer)  # skipped
    with pytest.raises(RuntimeError, match=r"step\(SGD\) for the second time"):
        each.scaler.step(each.optimizer)
    each.scaler.update()
    assert each.scaler.get_scale() == SCALE / 2
    each.passes(float("inf"))
    each.scaler.unscale_(each.optimizer)
    each.optimizer.zero_grad()
    each.scaler.update()  # what was found counts, though the gradients are gone
    assert each.scaler.get_scale() == SCALE / 4
    each.round()
    each.check(6)
    each.model.close()


def test_a_round_that_was_left_early_changes_no_later_step() -> None:
    run_ranks(2, left_early)


def anywhere() -> int:
    inside = Interrupts([grad_scaler, norms, visible_grads])
    first = Rounds()
    first.passes()
    inside.run(lambda: first.scaler.step(first.optimizer))
    first.model.close()
    points = inside.passed
    for at in range(points):
        each = Rounds()
        each.passes()
        assert inside.run(lambda: each.scaler.step(each.optimizer), at)  # noqa: B023
        refused = ""
        try:
            each.scaler.step(each.optimizer)
        except RuntimeError as error:
            refused = str(error)
        if "load a checkpoint" not in refused:  # in the midst of the update: see the engine's own tests
            assert not refused or "for the second time" in refused, inside.where
            each.scaler.update()
            each.check(1)
            each.round()
            each.check(2)
        each.model.close()
    return points


def test_an_interrupt_anywhere_in_a_step_neither_hides_nor_doubles_the_scale() -> None:
    (points,) = run_ranks(1, anywhere)
    assert points > 20
