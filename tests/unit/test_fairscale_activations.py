"""Copies of a module that ``checkpoint_wrapper`` was given compute with their own weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwise.fairscale.nn import checkpoint_wrapper
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = checkpoint_wrapper(nn.Linear(3, 3)), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.inner(x)) * times
        return found


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_copy_computes_with_its_own_weights(copied: Callable[[Any], Any], offload: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(checkpoint_wrapper(checkpoint_wrapper(Block()), offload), nn.Linear(3, 1))
    plain = nn.Sequential(Block(), nn.Linear(3, 1))
    other = copied(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5).add_(0.1)
    plain.load_state_dict(other.state_dict())
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3)
    for each in (other, plain):
        each(x).square().sum().backward()
    for (name, mine), theirs in zip(other.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-7, msg=name)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(other.buffers(), plain.buffers(), strict=True))
    with torch.no_grad():
        assert torch.equal(other(x), plain(x))


def test_a_forward_that_a_program_has_set_is_run() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x * 3.0  # type: ignore[method-assign]
    x = torch.ones(1, 2, requires_grad=True)
    checkpoint_wrapper(module)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 2), 3.0))  # type: ignore[arg-type]
