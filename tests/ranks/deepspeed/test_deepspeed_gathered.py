"""What programs do to parameters in ``zero.GatheredParameters``: other data is a write like any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sets import full
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close, run_ranks

QUICK = [(1, False), (3, True)]
OTHERS = [(1, True), (3, False)]


def engine_of(stage: int, half: bool) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": half},
        "gradient_clipping": 0.0,
    }
    return deepspeed.initialize(model=model, config=config)[0]


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


def given_on_all_ways(ranks: int, where: list[tuple[int, bool]]) -> None:
    for stage, half in where:
        for everywhere in (False, True):
            given(stage, half, everywhere, ranks - 1)


@pytest.mark.parametrize(("ranks", "where"), [(2, QUICK), *full((2, OTHERS), (1, QUICK), (1, OTHERS))])
def test_data_that_is_given_reaches_all_ranks(ranks: int, where: list[tuple[int, bool]]) -> None:
    run_ranks(ranks, given_on_all_ways, ranks, where)


def refused(stage: int) -> tuple[str, bool]:
    engine = engine_of(stage, False)
    before = engine.state_dict()
    found = ""
    try:
        with deepspeed.zero.GatheredParameters(engine.module, modifier_rank=0):
            if dist.get_rank() == 0:
                engine.module[0].weight.data = torch.ones(2, 3)
    except RuntimeError as error:
        found = str(error)
    after = engine.state_dict()
    engine.destroy()
    return found, all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_data_of_another_kind_is_an_error_on_every_rank(stage: int) -> None:
    (own, kept), (told, also) = run_ranks(2, refused, stage)
    assert "0.weight (now torch.float32 of shape (2, 3)" in own and kept and also
    assert "given data of another shape on ranks [0]" in told
