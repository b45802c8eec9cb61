"""``deepspeed.initialize`` inside ``zero.Init``: what the engine makes for itself is no part of the model."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed
from test_deepspeed import RANKS, batches, close, config, net, train

from shardwise import deepspeed
from shardwise.testing import assert_close, run_ranks


def initialized_inside() -> None:
    rank = torch.distributed.get_rank()
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = net()
        engine = deepspeed.initialize(model=model, config=config(3))[0]
        other = net()
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert torch.equal(model[0].bias.cpu(), net()[0].bias)  # type: ignore[index]
    assert all(p.is_meta for p in other.parameters())
    lost = pytest.warns(UserWarning, match="in-place changes of 0.bias are lost")
    with lost, deepspeed.zero.GatheredParameters(model.parameters()), torch.no_grad():
        model[0].bias.add_(1.0)  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert torch.equal(model[0].bias.cpu(), net()[0].bias)  # type: ignore[index]
    assert_close(engine.state_dict(), net().state_dict(), 0.0, "initialized inside zero.Init")
    ranks = torch.zeros(RANKS, device=engine.device)
    for gather in ("all_gather_into_tensor", "allgather_fn"):
        getattr(deepspeed.comm, gather)(ranks, torch.tensor(float(rank), device=engine.device))
        assert ranks.tolist() == list(range(RANKS))
        ranks.zero_()
    train(engine, batches(1), rank)
    close(engine)


def test_initialize_inside_zero_init() -> None:
    run_ranks(RANKS, initialized_inside)
