"""Learning-rate schedulers on the original and on the sharded optimizer, without a warning from either."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.plan import zero
from shardwise.session import build


@pytest.mark.filterwarnings("error")
def test_schedulers_built_before_and_after_do_not_warn() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session = build(model, optimizer, zero(2))
    after = torch.optim.lr_scheduler.StepLR(session.optimizer, 1, gamma=0.1)
    for _ in range(3):
        session.backward(session.module(torch.ones(2, 4)).sum())
        session.optimizer.step()
        session.optimizer.zero_grad()
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05**3)


def test_the_original_step_trains_nothing_before_and_after_close() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = build(model, optimizer, zero(2))
    with pytest.raises(RuntimeError, match="that boost, initialize or prepare returned"):
        optimizer.step()
    session.close()
    with pytest.raises(RuntimeError, match=r"model that is no longer sharded: make a new one on model\.parameters"):
        optimizer.step()
