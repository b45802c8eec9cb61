"""What programs write into an engine, and gradients that they drop between passes, against plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.testing import assert_close
from tests.support.ds_setup import close, ds_config, optimizer_block
from tests.support.ds_setup import start as start_engine
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

RANKS, MICRO, PASSES = 2, 3, 2
LIMITS = [0.05, 0.01, 0.0, 0.02]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def loss_of(model: Any, step: int, rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
    return 3.0 * model(torch.randn(MICRO, 6, generator=generator)).square().mean()


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
    passes, sgd = {"gradient_accumulation_steps": PASSES}, optimizer_block("SGD", lr=0.5)
    return start_engine(net(), ds_config(stage, MICRO, gradient_clipping=clip, optimizer=sgd, **passes))


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


@on_ranks(RANKS)
@pytest.mark.parametrize(("stage", "clip"), [(1, 1.0), (3, 0.3), *full((0, 0.0), (2, 0.0), (3, 0.0))])
def test_a_norm_that_is_set_in_training_is_what_steps_clip_to(stage: int, clip: float) -> None:
    weights, norms = plain(LIMITS, (0, 1))
    assert min(norms) > max(LIMITS)
    state, seen = limited(stage, clip, dist.get_rank())
    assert_close(state, weights, rtol=1e-6, what="set in training")
    assert seen == pytest.approx(norms, rel=1e-5)


@on_ranks(RANKS)
def test_a_norm_that_is_no_norm_or_that_one_rank_sets() -> None:
    engine, rank = start(2), dist.get_rank()
    with pytest.raises(TypeError, match="max_norm='a'"):
        engine.optimizer.clip_grad = "a"
    with pytest.raises(ValueError, match="max_norm=-1"):
        engine.optimizer.clip_grad = -1
    if rank == 0:
        engine.optimizer.clip_grad = 0.5
    raises(ValueError, r"different settings[\s\S]*max_norm|max_norm[\s\S]*different settings", passes, engine, 0, rank)
    engine.destroy()


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("stage", "whose"),
    [(1, "engine"), (3, "engine"), (3, "optimizer"), *full((0, "engine"), (2, "engine"), (1, "optimizer"))],
)
def test_zero_grad_before_each_pass_of_an_update(stage: int, whose: str) -> None:
    """DeepSpeed's engine sets ``.grad`` to ``None``, which at stages 2 and 3 sums are no longer in."""
    engine = start(stage)
    drop = engine.zero_grad if whose == "engine" else engine.optimizer.zero_grad
    for step in range(len(LIMITS)):
        passes(engine, step, dist.get_rank(), drop)
    assert engine.global_steps == len(LIMITS)
    keeps = stage >= 2 and whose == "engine"
    assert_close(close(engine), plain([0.0] * len(LIMITS), (0, 1) if keeps else (1,))[0], rtol=1e-6, what=whose)


def test_states_are_moved_by_the_optimizer_as_by_the_engine() -> None:
    engine = start(1)
    assert engine.optimizer.gradient_accumulation_steps == PASSES
    engine.tput_timer.update_epoch_count()
    with pytest.raises(AttributeError):
        engine.optimizer.loss_scaler.scale_window = 5  # which would have no effect
    passes(engine, 0, 0)
    engine.optimizer.offload_states(include=["optim_states"], device="cpu", pin_memory=False, non_blocking=False)
    raises(RuntimeError, None, lambda: engine.backward(loss_of(engine, 1, 0, 0)))
    engine.optimizer.reload_states(non_blocking=False)
    passes(engine, 1, 0)
    assert engine.global_steps == 2
    engine.destroy()
