"""``deepspeed.initialize`` inside ``zero.Init``: what the engine makes for itself is no part of the model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from test_deepspeed import RANKS, batches, close, config, net, train

from shardwise import deepspeed
from shardwise.core.comm import PeerError
from shardwise.testing import assert_close
from tests.support.on_ranks import on_ranks


@on_ranks(RANKS)
def test_initialize_inside_zero_init() -> None:
    rank = torch.distributed.get_rank()
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


@on_ranks(2)
def test_a_block_that_fails_is_told_to_the_ranks_that_wait_for_its_values() -> None:
    with deepspeed.zero.Init():
        model = net()
    error = "what rank 0 cannot give"
    told = [error, f"no changes were broadcast: rank 0: TypeError: {error}$"][torch.distributed.get_rank()]
    with (
        pytest.raises((TypeError, PeerError), match=told),
        deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0),
    ):
        if torch.distributed.get_rank() == 0:
            raise TypeError(error)
    torch.distributed.barrier()  # the program's own group works
