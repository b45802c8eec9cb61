"""Tensors in lists, tuples and dicts of optimizer state that wait in host memory and come back, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.optim.nested_state import tensors_of
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, data, seeded, sharded
from tests.support.sets import full

STEPS = 3


class Averages(torch.optim.Optimizer):
    """Several moving averages of the gradient, kept in nested values beside one that is not."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param]
                if not state:
                    state["plain"], state["count"] = torch.zeros_like(param), (torch.tensor(0.0), "steps")
                    state["several"] = [torch.zeros_like(param), {"deep": (torch.zeros_like(param), 1)}]
                several = [state["plain"], state["several"][0], state["several"][1]["deep"][0]]
                state["count"][0].add_(1.0)
                for place, average in enumerate(several):
                    average.lerp_(param.grad, 0.5 ** (place + 1))
                    param.add_(average, alpha=-group["lr"])


def _trained(name: str, moving: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    with sharded(model, Averages(model.parameters()), PLANS[name]) as session:
        for step in range(STEPS):
            session.backward(session.module(data(session.mesh.rank, step)).square().mean())
            session.optimizer.step()
            session.optimizer.zero_grad()
            if moving:
                _move(session)
        return session.module.state_dict(), session.optimizer.state_dict()


def _move(session: Any) -> None:
    states = [each for each in session.optimizers[0].state.values() if each]
    nested = [t for each in states for key in ("several", "count") for t in tensors_of(each[key])]
    moved = [each for each in nested if each.dim()]
    before = [each.data_ptr() for each in moved]
    counts = [each.data_ptr() for each in nested if not each.dim()]
    plain = sum(each["plain"].nbytes for each in states)
    assert len(moved) == 2 * len(states) and sum(each.nbytes for each in moved) == 2 * plain
    told = session.offload_states()
    # Masters are the parameters themselves here, so state is all there is; every place is rounded up.
    assert told >= 3 * plain
    assert all(each.data_ptr() != there for each, there in zip(moved, before, strict=True) if each.numel())
    away = [each.data_ptr() for each in moved]
    session.reload_states()
    assert all(each.data_ptr() != there for each, there in zip(moved, away, strict=True) if each.numel())
    assert counts == [each.data_ptr() for each in nested if not each.dim()]  # what counts never left


def _both(name: str) -> list[Any]:
    return [_trained(name, False), _trained(name, True)]


@pytest.mark.parametrize("name", ["zero3", *full("zero1")])
def test_nested_state_is_moved_and_comes_back_as_it_was(name: str) -> None:
    for stayed, moved in run_ranks(2, _both, name):
        assert_close(moved[0], stayed[0], 0.0, name)
        for number, state in stayed[1]["state"].items():
            other = moved[1]["state"][number]
            for one, two in zip(tensors_of(state), tensors_of(other), strict=True):
                assert torch.equal(one, two), (name, number)
