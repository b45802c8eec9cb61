"""No optimizer changes the reduced gradient that it is stepped with, whatever its kernel and options."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.core.update.tiles import NEVER, WHOLE, PendingTile, TileStepper
from shardwise.plan import zero
from shardwise.session import build
from tests.support.sets import full

CHOICES: dict[str, tuple[Any, ...]] = {
    "maximize": (False, True),
    "weight_decay": (0.0, 0.1),
    "momentum": (0.0, 0.9),
    "nesterov": (False, True),
    "dampening": (0.0, 0.1),
    "amsgrad": (False, True),
    "centered": (False, True),
    "decoupled_weight_decay": (False, True),
    "adamw_mode": (False, True),
}
KERNELS: tuple[dict[str, bool], ...] = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
"""The first leaves the choice to torch."""


def element_wise() -> list[type[torch.optim.Optimizer]]:
    found = [getattr(torch.optim, name) for name in torch.optim.__all__ if name != "Optimizer"]
    classes = [c for c in found if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    own: list[type[torch.optim.Optimizer]] = [CPUAdam, HybridAdam, FusedAdam]
    return [c for c in classes if c.__name__.lower() not in (*NEVER, *WHOLE)] + own


def options_of(kind: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Every combination that the class takes."""
    takes = inspect.signature(kind).parameters
    names = [name for name in CHOICES if name in takes]
    for values in itertools.product(*(CHOICES[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        if chosen.get("nesterov") and (not chosen.get("momentum", 1.0) or chosen.get("dampening")):
            continue
        for kernel in KERNELS:
            if all(name in takes for name in kernel):
                yield chosen | kernel


@contextmanager
def looking_at_gradients() -> Iterator[list[bool]]:
    """For every call that steps tiles inside, whether their gradients are afterwards what they were before."""
    kept: list[bool] = []
    real = TileStepper.step_tiles

    def step_tiles(self: TileStepper, due: Sequence[PendingTile], *rest: Any) -> None:
        held = [each.reduced for each in due]
        before = [each.clone() for each in held]
        real(self, due, *rest)
        kept.append(bool(held) and all(map(torch.equal, held, before)))

    with mock.patch.object(TileStepper, "step_tiles", step_tiles):
        yield kept


OF_A_KIND = ("Adam", "RMSprop", "RAdam", "Adamax", "FusedAdam")
"""Others with the same options, or of the same kernel, are in the quick set."""
OPTIMIZERS = [full(kind)[0] if kind.__name__ in OF_A_KIND else kind for kind in element_wise()]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_gradients_stay_what_they_are(kind: type[torch.optim.Optimizer]) -> None:
    tried = 0
    for options in options_of(kind):
        model = nn.Linear(3, 2)
        try:
            optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
        except (RuntimeError, ValueError):  # such a combination does not exist
            continue
        with looking_at_gradients() as kept:
            session = build(model, optimizer, zero(2))
            for _ in range(3):
                session.backward(session.module(torch.ones(2, 3)).square().sum())
                session.optimizer.step()
            session.close()
        assert len(kept) >= 3 and all(kept), f"{kind.__name__} with {options}"
        tried += 1
    assert tried
