"""ShardedOptimizerV2 on two ranks: state, loss scale, clipping, use before an optimizer; upstream's faults by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.testing import assert_close
from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
from shardwise.zero.sharded_model.utils import col_model_deepcopy
from tests.support.models import MODELS, make_batches
from tests.support.on_ranks import on_ranks
from tests.support.sharded_setup import OFFLOAD, SCALE, SETTINGS, STEPS, adam, built, linear, step_with, train

# ---- use before and without an optimizer, state


@on_ranks(2)
def test_an_optimizer_may_come_after_use() -> None:
    setting = SETTINGS["tied"]
    steps = make_batches(MODELS["tied"], 2, STEPS)
    model = built(setting)
    batch = steps[0][0][dist.get_rank()]
    with torch.no_grad():
        before = float(MODELS["tied"].loss(model, batch))
    state = model.state_dict()
    model.load_state_dict(state)
    train(setting, steps, model)
    fresh = built(setting)
    fresh.load_state_dict({name: value.half() for name, value in state.items()})
    train(setting, steps, fresh)
    assert_close(model.state_dict(), fresh.state_dict(), 0.0, "an optimizer after use")
    assert float(MODELS["tied"].loss(model, batch).detach()) < before
    for each in (model, fresh):
        each.close()


@on_ranks(2)
def test_col_model_deepcopy() -> None:
    model = built(SETTINGS["tied"])
    train(SETTINGS["tied"], make_batches(MODELS["tied"], 2, 1), model)
    other = MODELS["tied"].factory(seed=5)
    col_model_deepcopy(model, other)
    with pytest.raises(ValueError, match=r"differs in \['bias'"):
        col_model_deepcopy(model, nn.Linear(3, 3))
    copied = dict(other.named_parameters())
    state = {name: value for name, value in model.state_dict().items() if name in copied}
    assert_close({name: other.state_dict()[name] for name in state}, state, 0.0, "the copy")
    assert other.state_dict()["head.weight"].dtype is torch.float32
    model.close()


@on_ranks(2)
def test_defect_10_scaler_state_survives_a_resume() -> None:
    setting = SETTINGS["tied"]
    steps = make_batches(MODELS["tied"], 2, 4)
    straight, first, again = (built(setting) for _ in range(3))
    train(setting, steps, straight)
    optimizers = [
        ShardedOptimizerV2(model, adam(model), initial_scale=scale)
        for model, scale in ((first, SCALE), (again, 2 * SCALE))
    ]
    for model, optimizer, part in zip((first, again), optimizers, (steps[:2], steps[2:]), strict=True):
        if model is again:
            again.load_state_dict(first.state_dict())
            optimizer.load_state_dict(optimizers[0].state_dict())
        for step in part:
            optimizer.backward(MODELS["tied"].loss(model, step[0][dist.get_rank()]))
            optimizer.step()
    assert_close(again.state_dict(), straight.state_dict(), 0.0, "resumed")
    assert [each.loss_scale for each in optimizers] == [SCALE] * 2
    for each in (straight, first, again):
        each.close()


@on_ranks(2)
def test_defect_5_shape_mismatch_is_not_skipped() -> None:
    model, _ = linear()
    with pytest.raises(RuntimeError, match=r"weight: \(1, 5\) instead of \(1, 4\)"):
        model.load_state_dict({"weight": torch.zeros(1, 5)})
    model.close()


# ---- fp16


@on_ranks(2)
def test_defect_1_scaler_is_updated_before_unscaling() -> None:
    model, optimizer = linear(optimizer={"growth_interval": 2})
    before = model.state_dict()["weight"].flatten()
    for _ in range(6):
        after = step_with(model, optimizer, [0.25] * 4)
        assert float((after - before).norm()) == pytest.approx(0.5)
        before = after
    model.close()


@on_ranks(2)
def test_defect_9_default_scale_wastes_no_steps() -> None:
    for given, skipped, scale in (({}, 0, 2.0**16), ({"initial_scale": 2**32}, 4, 2.0**29)):
        strategy = TensorShardStrategy()
        with ZeroInitContext("cpu", strategy, shard_param=True):
            module = nn.Linear(4, 1, bias=False)
        model = ShardedModelV2(module, strategy)
        optimizer = ShardedOptimizerV2(model, torch.optim.SGD(model.parameters(), lr=1e-3), **given)
        count = 0
        for _ in range(4):
            optimizer.backward(model(torch.full((2, 4), 0.1)).float().mean())
            optimizer.step()
            count += optimizer.last_step_skipped
        assert (count, optimizer.loss_scale) == (skipped, scale)
        model.close()


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "cpu_offload"),
    [({}, False), ({"bf16": True}, False), ({"bf16": True, **OFFLOAD}, True)],
    ids=["defect_11", "defect_11_bf16", "defect_3_bf16_on_the_host"],
)
def test_clip_grad_norm_returns_the_unscaled_norm_and_clips(options: dict[str, Any], cpu_offload: bool) -> None:
    model, optimizer = linear(optimizer={"initial_scale": 64.0, "cpu_offload": cpu_offload}, **options)
    before = model.state_dict()["weight"].flatten()
    optimizer.backward(model(torch.tensor([[1.0, 2.0, 2.0, 4.0]])).sum())
    assert optimizer.clip_grad_norm(model, 0.5) == pytest.approx(5.0)
    optimizer.step()
    assert float((model.state_dict()["weight"].flatten() - before).norm()) == pytest.approx(0.5, rel=1e-5)
    model.close()
