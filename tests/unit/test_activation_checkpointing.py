"""deepspeed.checkpointing: the same bits as without it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.deepspeed import checkpointing


class Net(nn.Module):
    """Dropout, and arguments that are no tensors."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.up, self.down, self.call = nn.Linear(6, 10), nn.Linear(10, 6), call

    def block(self, x: Tensor, power: int) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training)
        return x + self.down(hidden) ** power

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.call(self.block, self.call(self.block, x, 2), 1)
        return value.square().mean()


def test_a_checkpointed_function_gives_the_same_bits() -> None:
    plain = Net(lambda function, *args: function(*args))
    kept = copy.deepcopy(plain)
    kept.call = checkpointing.checkpoint
    x = torch.randn(4, 6)
    losses = []
    for model in (plain, kept):
        torch.manual_seed(1)
        loss = model(x)
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(checkpointing.checkpoint(torch.tanh, x), torch.tanh(x))


def test_other_ways_to_keep_arguments_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_configured", [])
    assert not checkpointing.is_configured()
    with pytest.warns(UserWarning, match=r"configure\(partition_activations, checkpoint_in_cpu\) has no effect"):
        checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True, num_checkpoints=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointing.configure(None, profile=True)
        checkpointing.reset()
    assert checkpointing.is_configured()
