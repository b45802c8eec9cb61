"""Values that autograd saved and that were changed since: an error, as in plain torch, whatever hooks pack them."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from shardwise.plan import Plan
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, loss_of, seeded, sgd, sharded, told
from tests.support.sets import full


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


class Overwriting(nn.Module):
    """Changes what ``exp`` has saved for backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return y.add_(1.0)


def overwritten(plan: Plan) -> str:
    model = seeded(lambda: nn.Sequential(net(), Overwriting(), net()))
    with sharded(model, sgd(model), plan) as session:
        loss = loss_of(session)
        return told(lambda: session.backward(loss))


@pytest.mark.parametrize("name", ["zero2", "zero3", *full("zero3_gloo")])
def test_saved_values_that_were_changed_are_an_error(name: str) -> None:
    """As in plain torch, whose own check leaves out what hooks have packed."""
    for message in run_ranks(2, overwritten, PLANS[name]):
        assert "modified by an inplace operation" in message
