"""What programs write into an engine, and gradients that they drop between passes, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sets import full
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close, run_ranks

RANKS, MICRO, PASSES = 2, 3, 2
LIMITS = [0.05, 0.01, 0.0, 0.02]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def loss_of(model: Any, step: int, rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
    value: Tensor = 3.0 * model(torch.randn(MICRO, 6, generator=generator)).square().mean()
    return value


def plain(limits: list[float], turns: tuple[int, ...], ranks: int = RANKS) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, and norms before clipping, where these of a step's passes count."""
    model, norms = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, limit in enumerate(limits):
        optimizer.zero_grad()
        every = [loss_of(model, step, rank, turn) for turn in turns for rank in range(ranks)]
        (sum(every) / (PASSES * ranks)).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))))
        optimizer.step()
    return model.state_dict(), norms


def start(stage: int, clip: float = 0.0) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=net(), config=config)[0]


def close(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    state = engine.module_state_dict()
    engine.destroy()
    return state


def passes(engine: deepspeed.DeepSpeedEngine, step: int, rank: int, before: Any = lambda: None) -> None:
    for turn in range(PASSES):
        before()
        engine.backward(loss_of(engine, step, rank, turn))
        engine.step()


def limited(stage: int, clip: float, rank: int) -> tuple[dict[str, Tensor], list[float]]:
    engine, norms = start(stage, clip), []
    for step, limit in enumerate(LIMITS):
        engine.optimizer.clip_grad = limit
        passes(engine, step, rank)
        assert limit == engine.gradient_clipping() == engine.optimizer.clip_grad
        norms.append(engine.get_global_grad_norm())
    return close(engine), norms  # type: ignore[return-value]


Limited = tuple[int, float]
LIMITED: dict[str, list[Limited]] = {
    "clipped before": [(1, 1.0), (3, 0.3)],
    "at other stages": [(0, 0.0), (2, 0.0), (3, 0.0)],
}


def of_one_rank() -> list[str]:
    engine, rank = start(2), dist.get_rank()
    with pytest.raises(TypeError, match="max_norm='a'"):
        engine.optimizer.clip_grad = "a"
    with pytest.raises(ValueError, match="max_norm=-1"):
        engine.optimizer.clip_grad = -1
    if rank == 0:
        engine.optimizer.clip_grad = 0.5
    with pytest.raises(ValueError, match="different settings") as error:
        passes(engine, 0, rank)
    engine.destroy()
    return [str(error.value)]


def every_limit(cases: list[Limited]) -> list[Any]:
    found = [limited(*case, dist.get_rank()) for case in cases]
    return [*found, of_one_rank()]


@pytest.mark.parametrize("cases", ["clipped before", *full("at other stages")])
def test_a_norm_that_is_set_in_training_is_what_steps_clip_to(cases: str) -> None:
    weights, norms = plain(LIMITS, (0, 1))
    assert min(norms) > max(LIMITS)
    for found in run_ranks(RANKS, every_limit, LIMITED[cases]):
        for case, (state, seen) in zip(LIMITED[cases], found, strict=False):
            assert_close(state, weights, rtol=1e-6, what=str(case))
            assert seen == pytest.approx(norms, rel=1e-5), case
        assert "max_norm" in found[-1][0]


def test_a_norm_that_is_set_where_updates_make_it() -> None:
    """In one process, where a norm that nothing depends on is made by the update."""
    weights, norms = plain(LIMITS, (0, 1), ranks=1)
    state, seen = limited(1, 0.0, 0)
    assert_close(state, weights, rtol=1e-6, what="one process")
    assert seen == pytest.approx(norms, rel=1e-5)
    engine = start(1)
    passes(engine, 0, 0)
    late = engine.optimizer._late_norm
    assert late.collects
    engine.optimizer.clip_grad = 0.1  # updates keep nothing for a norm that nobody asks them for
    before = len(late._shares)
    passes(engine, 1, 0)
    assert not late.collects and len(late._shares) == before > 0
    engine.destroy()


def dropping(stage: int, whose: str) -> dict[str, Tensor]:
    engine = start(stage)
    drop = engine.zero_grad if whose == "engine" else engine.optimizer.zero_grad
    for step in range(len(LIMITS)):
        passes(engine, step, dist.get_rank(), drop)
    assert engine.global_steps == len(LIMITS)
    return close(engine)


Dropping = tuple[int, str]
DROPPING: dict[str, list[Dropping]] = {
    "of either": [(1, "engine"), (3, "engine"), (3, "optimizer")],
    "at other stages": [(0, "engine"), (2, "engine"), (1, "optimizer")],
}


def every_drop(cases: list[Dropping]) -> list[dict[str, Tensor]]:
    return [dropping(*case) for case in cases]


@pytest.mark.parametrize("cases", ["of either", *full("at other stages")])
def test_zero_grad_before_each_pass_of_an_update(cases: str) -> None:
    """DeepSpeed's engine sets ``.grad`` to ``None``, which at stages 2 and 3 sums are no longer in."""
    off = [0.0] * len(LIMITS)
    kept, rest = plain(off, (0, 1))[0], plain(off, (1,))[0]
    for found in run_ranks(RANKS, every_drop, DROPPING[cases]):
        for (stage, whose), state in zip(DROPPING[cases], found, strict=True):
            keeps = stage >= 2 and whose == "engine"
            assert_close(state, kept if keeps else rest, rtol=1e-6, what=f"stage {stage}, zero_grad of the {whose}")


def test_states_are_moved_by_the_optimizer_as_by_the_engine() -> None:
    engine = start(1)
    assert engine.optimizer.gradient_accumulation_steps == PASSES
    engine.tput_timer.update_epoch_count()
    with pytest.raises(AttributeError):
        engine.optimizer.loss_scaler.scale_window = 5  # which would have no effect
    passes(engine, 0, 0)
    engine.optimizer.offload_states(include=["optim_states"], device="cpu", pin_memory=False, non_blocking=False)
    with pytest.raises(RuntimeError):
        engine.backward(loss_of(engine, 1, 0, 0))
    engine.optimizer.reload_states(non_blocking=False)
    passes(engine, 1, 0)
    assert engine.global_steps == 2
    engine.destroy()
