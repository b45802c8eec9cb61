"""torch's ``AveragedModel`` of a model that computes in 16 bits: an average of fp32 values, as the limits page says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise import shard
from shardwise.testing import assert_close, run_ranks


def averages(stage: int) -> list[str]:
    """What a direct update says, with the average of the copy held against one made by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain, average = copy.deepcopy(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    session = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision="bf16")
    expected: dict[str, torch.Tensor] = {}
    for _ in range(3):
        session.backward(session.module(torch.ones(2, 4)).float().square().mean())
        session.optimizers[0].step()
        session.optimizers[0].zero_grad()
        state = session.module.state_dict()
        plain.load_state_dict(state)
        average.update_parameters(plain)
        expected = {name: (expected.get(name, value) + value) / 2 for name, value in state.items()}
    found = average.module.state_dict()
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert any(bool((value != value.bfloat16()).any()) for value in state.values())
    assert_close(found, expected, 1e-6, "average")
    with pytest.raises(RuntimeError) as error, session.module.gathered():
        average.update_parameters(model)
    session.close()
    return getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("stage", [1, 3])
def test_an_average_of_masters_and_what_an_average_of_16_bits_says(stage: int) -> None:
    for notes in run_ranks(2, averages, stage):
        assert len(notes) == 1 and "torch.bfloat16" in notes[0] and "load session.module.state_dict()" in notes[0]
