"""ShardedOptimizerV2 on two ranks: state, loss scale, clipping, use before an optimizer; upstream's faults by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_setup import OFFLOAD, SCALE, SETTINGS, STEPS, adam, built, linear, step_with, train
from torch import Tensor, nn

from shardwise.testing import assert_close, run_ranks
from shardwise.zero import (
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
)
from shardwise.zero.sharded_model.utils import col_model_deepcopy
from tests.support.models import MODELS, make_batches

# ---- use before and without an optimizer, state


def late_optimizer() -> tuple[list[float], dict[str, Tensor]]:
    setting = SETTINGS["tied"]
    steps = make_batches(MODELS["tied"], 2, STEPS)
    model = built(setting)
    with torch.no_grad():
        first = float(MODELS["tied"].loss(model, steps[0][0][dist.get_rank()]))
    state = model.state_dict()
    model.load_state_dict(state)
    train(setting, steps, model)
    fresh = built(setting)
    fresh.load_state_dict({name: value.half() for name, value in state.items()})
    train(setting, steps, fresh)
    assert_close(model.state_dict(), fresh.state_dict(), 0.0, "an optimizer after use")
    loss = float(MODELS["tied"].loss(model, steps[0][0][dist.get_rank()]).detach())
    for each in (model, fresh):
        each.close()
    return [first, loss], state


def test_an_optimizer_may_come_after_use() -> None:
    for (before, after), _ in run_ranks(2, late_optimizer):
        assert after < before


def copies() -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    setting = SETTINGS["tied"]
    model = built(setting)
    train(setting, make_batches(MODELS["tied"], 2, 1), model)
    other = MODELS["tied"].factory(seed=5)
    col_model_deepcopy(model, other)
    said = ""
    try:
        col_model_deepcopy(model, nn.Linear(3, 3))
    except ValueError as error:
        said = str(error)
    state = {name: value for name, value in model.state_dict().items() if name in dict(other.named_parameters())}
    model.close()
    return dict(other.state_dict()), state, said


def test_col_model_deepcopy() -> None:
    for other, state, said in run_ranks(2, copies):
        assert_close({name: other[name] for name in state}, state, 0.0, "the copy")
        assert other["head.weight"].dtype is torch.float32
        assert "differs in ['bias'" in said


def resumed(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    setting = SETTINGS["tied"]
    steps = make_batches(MODELS["tied"], 2, 4)
    straight = built(setting)
    train(setting, steps, straight)
    first = built(setting)
    optimizer = ShardedOptimizerV2(first, adam(first), initial_scale=SCALE)
    again = built(setting)
    resumed_optimizer = ShardedOptimizerV2(again, adam(again), initial_scale=2 * SCALE)
    for model, wrapped, part in ((first, optimizer, steps[:2]), (again, resumed_optimizer, steps[2:])):
        if model is again:
            again.load_state_dict(first.state_dict())
            resumed_optimizer.load_state_dict(optimizer.state_dict())
        for step in part:
            wrapped.backward(MODELS["tied"].loss(model, step[0][dist.get_rank()]))
            wrapped.step()
    result = straight.state_dict(), again.state_dict(), optimizer.loss_scale, resumed_optimizer.loss_scale
    for each in (straight, first, again):
        each.close()
    return result


def test_defect_10_scaler_state_survives_a_resume(tmp_path: Path) -> None:
    for straight, again, before, after in run_ranks(2, resumed, str(tmp_path)):
        assert_close(again, straight, 0.0, "resumed")
        assert before == after == SCALE


def test_defect_5_shape_mismatch_is_not_skipped() -> None:
    for said in run_ranks(2, mismatched):
        assert "weight: (1, 5) instead of (1, 4)" in said


def mismatched() -> str:
    model, _ = linear()
    try:
        model.load_state_dict({"weight": torch.zeros(1, 5)})
    except RuntimeError as error:
        return str(error)
    finally:
        model.close()
    return ""


# ---- fp16


def update_norms() -> list[float]:
    model, optimizer = linear(optimizer={"growth_interval": 2})
    norms, before = [], model.state_dict()["weight"].flatten()
    for _ in range(6):
        after = step_with(model, optimizer, [0.25, 0.25, 0.25, 0.25])
        norms.append(float((after - before).norm()))
        before = after
    model.close()
    return norms


def test_defect_1_scaler_is_updated_before_unscaling() -> None:
    for norms in run_ranks(2, update_norms):
        assert norms == pytest.approx([0.5] * 6)


def skipped(given: dict[str, Any]) -> tuple[int, float]:
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
    model.close()
    return count, optimizer.loss_scale


def test_defect_9_default_scale_wastes_no_steps() -> None:
    assert run_ranks(2, skipped, {}) == [(0, 2.0**16)] * 2
    assert run_ranks(2, skipped, {"initial_scale": 2**32}) == [(4, 2.0**29)] * 2


def clipped(options: dict[str, Any]) -> tuple[float, float]:
    optimizer_options = {"initial_scale": 64.0, **options.pop("optimizer", {})}
    model, optimizer = linear(optimizer=optimizer_options, **options)
    before = model.state_dict()["weight"].flatten()
    optimizer.backward(model(torch.tensor([[1.0, 2.0, 2.0, 4.0]])).sum())
    norm = optimizer.clip_grad_norm(model, 0.5)
    optimizer.step()
    update = float((model.state_dict()["weight"].flatten() - before).norm())
    model.close()
    return norm, update


@pytest.mark.parametrize("bf16", [False, True])
def test_defect_11_clip_grad_norm_returns_the_unscaled_norm(bf16: bool) -> None:
    for norm, update in run_ranks(2, clipped, {"bf16": bf16}):
        assert norm == pytest.approx(5.0) and update == pytest.approx(0.5, rel=1e-5)


def test_defect_3_bf16_on_the_host_is_clipped() -> None:
    options = {"bf16": True, **OFFLOAD, "optimizer": {"cpu_offload": True}}
    for norm, update in run_ranks(2, clipped, options):
        assert norm == pytest.approx(5.0) and update == pytest.approx(0.5, rel=1e-5)


def overflow() -> tuple[list[float], list[float], str]:
    model, optimizer = linear(optimizer={"hysteresis": 1})
    before = model.state_dict()["weight"].flatten().tolist()
    bad = 3e38 if dist.get_rank() == 1 else 1.0  # on one rank only
    optimizer.backward(model(torch.ones(1, 4)).sum().float() * bad)
    optimizer.step()
    unchanged = model.state_dict()["weight"].flatten().tolist()
    assert optimizer.last_step_skipped and optimizer.loss_scale == 8.0
    assert unchanged == before
    after = step_with(model, optimizer, [1.0] * 4).tolist()
    model.close()
    return before, after, optimizer.skipped_because


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for before, after, _ in run_ranks(2, overflow):
        assert before == [8.0] * 4 and after == [7.0] * 4
