"""Ctrl-C at every point of small blocks that change something for a while: it is changed back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from interrupts import Interrupts
from torch import nn

from shardwise import draws
from shardwise.booster.plugin import fsdp
from shardwise.update import step_hooks

CPU = torch.device("cpu")


@pytest.mark.parametrize("nested", [False, True])
def test_numbers_that_all_ranks_draw_are_left_to_them(nested: bool) -> None:
    inside = Interrupts([draws])
    dropouts = draws.dropouts_of([nn.Dropout(0.5)])

    def act(private: draws.Private) -> None:
        with private.drawing(True, CPU, dropouts):
            torch.rand(3)
            if nested:
                with private.drawing(False, CPU, dropouts):
                    pass

    def state_after(at: int | None) -> bytes:
        torch.manual_seed(5)
        private = draws.Private(1)
        inside.run(lambda: act(private), at)
        private.leave()  # as at the end of whatever module is left
        assert not private.inside, inside.where
        return torch.get_rng_state().numpy().tobytes()

    torch.manual_seed(5)
    untouched = torch.get_rng_state().numpy().tobytes()
    drawn = state_after(None)
    points = inside.passed
    assert points > 10
    for at in range(points):
        assert state_after(at) in (untouched, drawn), inside.where


class Registered(torch.optim.SGD):
    """Takes no classes below it, so that nothing can stand in for it."""

    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("one of this name is registered")


def test_an_optimizer_has_its_hooks_again() -> None:
    optimizer = Registered([nn.Parameter(torch.ones(2))], lr=0.5)
    drop = vars(optimizer)["zero_grad"] = lambda set_to_none=True: None
    bare, inside = step_hooks.BareStep(optimizer), Interrupts([step_hooks])
    own = optimizer.param_groups, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks

    def act() -> None:
        with bare.hidden():
            assert "zero_grad" not in vars(optimizer)

    assert not inside.run(act)
    points = inside.passed
    assert points > 4
    for at in range(points):
        assert inside.run(act, at)
        now = optimizer.param_groups, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        assert all(one is other for one, other in zip(now, own, strict=True)), inside.where
        assert vars(optimizer).get("zero_grad") is drop, inside.where


class Units(nn.Linear):
    """Stands for a module with two sharded units."""

    synced = (True, True)

    def set_requires_gradient_sync(self, wanted: bool) -> None:
        self.synced = (wanted, self.synced[1])
        _between()
        self.synced = (wanted, wanted)


def _between() -> None:
    if BREAKS:
        BREAKS.clear()
        raise KeyboardInterrupt


BREAKS: list[bool] = []


def test_units_reduce_again_after_no_sync() -> None:
    units, inside = Units(2, 2), Interrupts([fsdp])
    wrapped = fsdp.TorchFSDPModel(units)

    def act() -> None:
        with wrapped.no_sync():
            assert units.synced == (False, False)

    assert not inside.run(act) and inside.passed >= 2
    for at in range(inside.passed):
        inside.run(act, at)
        assert units.synced == (True, True), inside.where
    BREAKS.append(True)
    with contextlib.suppress(KeyboardInterrupt):
        act()
    assert not BREAKS and units.synced == (True, True)
