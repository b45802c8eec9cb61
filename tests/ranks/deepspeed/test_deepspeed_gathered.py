"""What programs do to parameters in ``zero.GatheredParameters``: other data is a write like any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close
from tests.support.ds_setup import ds_config, optimizer_block, start
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

QUICK = [(1, False), (3, True)]
OTHERS = [(1, True), (3, False)]


def engine_of(stage: int, half: bool) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return start(model, ds_config(stage, optimizer=optimizer_block("SGD", lr=0.5), bf16={"enabled": half}))


def given(stage: int, half: bool, everywhere: bool, rank: int) -> None:
    """Weights after one rank, or each its own, has given a parameter other data, and after a step."""
    engine = engine_of(stage, half)
    weight, dtype, mine = engine.module[0].weight, torch.bfloat16 if half else torch.float32, dist.get_rank()
    expected = engine.state_dict()
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=rank):
        if everywhere or mine == rank:
            weight.data = torch.full((4, 3), 2.0 + mine, dtype=dtype)
    expected["0.weight"] = torch.full((4, 3), 2.0 + rank)
    assert_close(engine.state_dict(), expected, 0.0, "what the modifier rank gave")
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=rank):
        assert torch.equal(weight.detach().float(), expected["0.weight"])
        if mine == rank:  # one value for all, and a turned matrix
            weight.data = torch.tensor(-1.5, dtype=dtype).expand(4, 3)
    expected["0.weight"] = torch.full((4, 3), -1.5)
    assert_close(engine.state_dict(), expected, 0.0, "data that overlaps")
    values = torch.arange(12.0).view(3, 4).t()
    with deepspeed.zero.GatheredParameters(engine.module, modifier_rank=rank):
        if mine == rank:
            weight.data = values.to(dtype)
    expected["0.weight"] = values.clone()
    assert_close(engine.state_dict(), expected, 0.0, "data in another order")
    other = engine_of(stage, half)
    other.load_state_dict(expected)
    for each in (engine, other):
        each.backward(each(torch.ones(1, 3, dtype=dtype)).float().sum())
        each.step()
    assert_close(engine.state_dict(), other.state_dict(), 0.0, "training goes on")
    for each in (engine, other):
        each.destroy()


@on_ranks()
@pytest.mark.parametrize(("ranks", "where"), [(2, QUICK), *full((2, OTHERS), (1, QUICK), (1, OTHERS))])
def test_data_that_is_given_reaches_all_ranks(ranks: int, where: list[tuple[int, bool]]) -> None:
    for stage, half in where:
        for everywhere in (False, True):
            given(stage, half, everywhere, ranks - 1)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_data_of_another_kind_is_an_error_on_every_rank(stage: int) -> None:
    engine, rank = engine_of(stage, False), dist.get_rank()
    before = engine.state_dict()
    told = [r"0.weight \(now torch.float32 of shape \(2, 3\)", r"given data of another shape on ranks \[0\]"][rank]
    with pytest.raises(RuntimeError, match=told), deepspeed.zero.GatheredParameters(engine.module, modifier_rank=0):
        if rank == 0:
            engine.module[0].weight.data = torch.ones(2, 3)
    assert_close(engine.state_dict(), before, 0.0, "what was refused")
    engine.destroy()
