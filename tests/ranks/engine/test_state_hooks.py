"""Models whose own hooks change their ``state_dict()``: states and loads as in plain torch, or an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.mesh import init_distributed
from shardwise.testing import run_ranks

State = dict[str, Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


class Adapted(nn.Module):
    """Saves its adapter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.register_state_dict_post_hook(Adapted.drop)

    @staticmethod
    def drop(_: nn.Module, state: State, prefix: str, _metadata: Any) -> None:
        for name in ("base.weight", "base.bias"):
            state.pop(prefix + name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.adapter(self.base(x))
        return out


def adapted(seed: int) -> Adapted:
    torch.manual_seed(seed)
    return Adapted()


def values(model: nn.Module) -> State:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def left_out(stage: int) -> list[State]:
    init_distributed()
    found, pretrained = [], values(adapted(7))
    for strict in (True, False):
        model = adapted(1)
        with pytest.raises(RuntimeError, match="base.weight"):  # as plain torch, which misses it, too
            model.load_state_dict(model.state_dict())
        session = shardwise.shard(model, sgd(model), stage=stage)
        state = session.module.state_dict()
        assert sorted(state) == ["adapter.bias", "adapter.weight"]
        with pytest.raises(RuntimeError, match=r"missing \['base.weight', 'base.bias'\]"):
            session.module.load_state_dict(state)
        assert session.module.load_state_dict(state, strict=False).missing_keys == ["base.weight", "base.bias"]
        keys = session.module.load_state_dict(pretrained, strict=strict)
        assert not keys.missing_keys and not keys.unexpected_keys
        with pytest.raises(RuntimeError, match=r"base.weight: \(3, 4\) instead of \(4, 4\)"):
            session.module.load_state_dict(pretrained | {"base.weight": torch.ones(3, 4)})
        with session.module.gathered():
            found.append(values(model))
        session.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_a_hook_leaves_out_can_be_loaded(stage: int) -> None:
    """By the names that they have in the model; strict loading misses them."""
    plain = adapted(1)
    plain.load_state_dict(values(adapted(7)))
    for states in run_ranks(2, left_out, stage):
        for state in states:
            assert state.keys() == values(plain).keys()
            assert all(torch.equal(value, state[name]) for name, value in values(plain).items())
