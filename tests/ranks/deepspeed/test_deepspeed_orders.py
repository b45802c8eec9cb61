"""Ranks that give parameters in different orders: each gets its own values, or the call is an error on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import deepspeed
from shardwise.testing import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "gradient_clipping": 0.0,
}


def values(second: int) -> list[list[float]]:
    with deepspeed.zero.Init():
        if second:
            model: nn.Module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(3, second, bias=False))
        else:  # a copy, as nn.TransformerEncoder makes them
            layer = nn.Linear(3, 4, bias=False)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers  # type: ignore[arg-type]
    params = list(model.parameters())
    order = params if dist.get_rank() == 0 else [*reversed(params), params[0]]
    with deepspeed.zero.GatheredParameters(order, modifier_rank=0), torch.no_grad():
        for number, param in enumerate(params, 1):
            param.fill_(number)
    before = [param.unique().tolist() for param in params]
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    assert [value.unique().tolist() for value in engine.state_dict().values()] == before
    engine.destroy()
    return before


@pytest.mark.parametrize("second", [4, 5, 0])
def test_gathered_parameters_without_an_engine(second: int) -> None:
    assert run_ranks(2, values, second) == [[[1.0], [2.0]]] * 2


def refused() -> list[str]:
    with deepspeed.zero.Init():
        params = list(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)).parameters())
    messages = []
    for own in (params[: 4 - dist.get_rank()], params[:2] if dist.get_rank() == 0 else params[1:3]):
        try:
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                pass
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_different_parameters_without_an_engine_are_an_error() -> None:
    for number, shape in run_ranks(2, refused):
        assert "parameter 3 is on rank 0 and not on rank 1" in number
        assert "shape of parameter 0 is '(4,)' on rank 1 and '(4, 3)' on rank 0" in shape
