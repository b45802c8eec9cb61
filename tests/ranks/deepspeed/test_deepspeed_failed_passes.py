"""What DeepSpeed's engine counts where a pass fails or a step raises: updates stay where they belong."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from tests.support.ds_setup import close, start
from tests.support.on_ranks import on_ranks

PASSES = 4
RATE = 0.5


def started(stage: int, passes: int = PASSES, **more: Any) -> deepspeed.DeepSpeedEngine:
    """SGD, whose rate halves with each step; weights of 0."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": passes,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        **more,
    }
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    return start(model, config, optimizer=sgd, lr_scheduler=schedule)


def loss(engine: deepspeed.DeepSpeedEngine, number: float) -> Tensor:
    return engine(torch.full((1, 4), float(number), dtype=engine.module.weight.dtype)).float().sum()


def make(engine: deepspeed.DeepSpeedEngine, *numbers: float) -> None:
    for number in numbers:
        engine.backward(loss(engine, number))
        engine.step()


def seen(engine: deepspeed.DeepSpeedEngine) -> list[float]:
    """A weight, the rate, and what is counted."""
    counted = [engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps]
    return [float(engine.state_dict()["weight"][0, 0]), engine.get_lr()[0], *map(float, counted)]


def failing(engine: deepspeed.DeepSpeedEngine) -> None:
    value = loss(engine, 3.0)
    value.register_hook(lambda grad: grad.item() + "")
    with pytest.raises(TypeError):
        engine.backward(value)


@on_ranks(2)
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_passes_are_counted_anew_where_one_failed(stage: int, clears: bool) -> None:
    engine = started(stage)
    make(engine, 1, 2)
    failing(engine)
    if clears:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is kept, and what goes was to go
            engine.zero_grad()
        assert not engine.session.passes_held
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make(engine, 1, 2, 3)  # all passes of the step again, as the warning says
        assert clears or any("Make all passes of the step again" in str(each.message) for each in told)
    assert engine.global_steps == 0 and seen(engine)[0] == 0.0
    make(engine, 4)
    samples = PASSES * engine.dp_world_size
    assert seen(engine) == [-RATE * 2.5, RATE / 2, 1.0, 6.0, samples, 0.0]  # by hand: the mean of 1, 2, 3 and 4
    close(engine)


@on_ranks(2)
def test_an_update_counts_whatever_is_raised_behind_it() -> None:
    """An exception behind the update, as Ctrl-C is raised when it is over."""
    engine = started(2)
    make(engine, 1, 2, 3)
    engine.backward(loss(engine, 4))
    made = engine.optimizer.step

    def step() -> None:
        made()
        raise KeyboardInterrupt

    with mock.patch.object(engine.optimizer, "step", step), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert seen(engine) == [-RATE * 2.5, RATE / 2, 1.0, PASSES, PASSES * engine.dp_world_size, 0.0]
    make(engine, 1, 2, 3, 4)
    assert engine.global_steps == 2
    close(engine)
