"""``deepspeed.initialize`` inside ``zero.Init``: what the engine makes for itself is no part of the model.

Ranks that give parameters in different orders: each gets its own values, or the call is an error on every rank.
"""

import pytest
import torch
import torch.distributed as dist
from test_deepspeed import RANKS, batches, close, config, net, train
from torch import nn

from shardwise import deepspeed
from shardwise.core.comm import PeerError
from shardwise.testing import assert_close
from tests.support.ds_setup import ds_config
from tests.support.on_ranks import on_ranks


@on_ranks(RANKS)
def test_initialize_inside_zero_init() -> None:
    rank = dist.get_rank()
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = net()
        engine = deepspeed.initialize(model=model, config=config(3))[0]
        other = net()
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert torch.equal(model[0].bias.cpu(), net()[0].bias)  # type: ignore[index]
    assert all(p.is_meta for p in other.parameters())
    with deepspeed.zero.GatheredParameters(model.parameters()), torch.no_grad():
        model[0].bias.add_(1.0)  # type: ignore[index]
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(model[0].bias.cpu(), net()[0].bias)  # type: ignore[index]
    assert_close(engine.state_dict(), net().state_dict(), 0.0, "initialized inside zero.Init")
    ranks = torch.zeros(RANKS, device=engine.device)
    deepspeed.comm.all_gather_into_tensor(ranks, torch.tensor([float(rank)], device=engine.device))
    assert ranks.tolist() == list(range(RANKS))
    train(engine, batches(1), rank)
    close(engine)


class Written(nn.Module):
    """Writes to its parameters while it is built, as a model for zero.Init does."""

    def __init__(self, written: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.empty(6))
        with deepspeed.zero.GatheredParameters([self.first.weight, self.scale], modifier_rank=0), torch.no_grad():
            self.first.weight[1:3].mul_(written)
            self.first.weight[0] = torch.randn(5)
            self.scale[:4].fill_(written)
            self.scale[4:] = self.second.bias[:2]
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)) * self.scale[:3])


@on_ranks(RANKS)
def test_parameters_that_are_written_to_inside_zero_init() -> None:
    torch.manual_seed(3)
    plain = Written(1).state_dict()
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = Written(dist.get_rank() + 1)
    assert model.last.weight.is_meta and not model.scale.is_meta
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    # The first rank's, which are those of plain torch, as are random numbers after them.
    assert_close(engine.state_dict(), plain, 0.0, "parameters that a constructor wrote to")
    close(engine)


@on_ranks(2)
def test_a_block_that_fails_is_told_to_the_ranks_that_wait_for_its_values() -> None:
    with deepspeed.zero.Init():
        model = net()
    error = "what rank 0 cannot give"
    told = [error, f"no changes were broadcast: rank 0: TypeError: {error}$"][dist.get_rank()]
    with (
        pytest.raises((TypeError, PeerError), match=told),
        deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0),
    ):
        if dist.get_rank() == 0:
            raise TypeError(error)
    dist.barrier()  # the program's own group works


@on_ranks(2)
@pytest.mark.parametrize("second", [4, 5, 0])
def test_gathered_parameters_without_an_engine(second: int) -> None:
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
    assert [param.unique().tolist() for param in params] == [[1.0], [2.0]]
    engine = deepspeed.initialize(model=model, config=ds_config(3))[0]
    assert [value.unique().tolist() for value in engine.state_dict().values()] == [[1.0], [2.0]]
    engine.destroy()


@on_ranks(2)
def test_different_parameters_without_an_engine_are_an_error() -> None:
    with deepspeed.zero.Init():
        params = list(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)).parameters())
    rank, gathered = dist.get_rank(), deepspeed.zero.GatheredParameters
    for own, words in (
        (params[: 4 - rank], "parameter 3 is on rank 0 and not on rank 1"),
        (params[rank : rank + 2], r"shape of parameter 0 is '\(4,\)' on rank 1 and '\(4, 3\)' on rank 0"),
    ):
        with pytest.raises(ValueError, match=words), gathered(own, modifier_rank=0):
            pass
