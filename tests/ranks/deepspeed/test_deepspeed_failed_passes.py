"""What DeepSpeed's engine counts where a pass fails or a step raises: updates stay where they belong.

What DeepSpeed's engine counts: samples of the passes that a step was made of, whoever says when it is due.
"""

import contextlib
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise import deepspeed
from tests.support.ds_setup import close, ds_config, start
from tests.support.on_ranks import on_ranks

PASSES = 4
RATE = 0.5


def started(stage: int, passes: int = PASSES, **more: Any) -> deepspeed.DeepSpeedEngine:
    """SGD, whose rate halves with each step; weights of 0."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    config = ds_config(stage, gradient_accumulation_steps=passes, **more)
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
    with warnings.catch_warnings(record=True, action="always") as told:
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


@on_ranks(2)
def test_samples_are_those_of_the_passes_of_each_step() -> None:
    engine = started(2, 1, managed_gradient_accumulation=False)
    for passes, counted in ((3, (1, 3)), (1, (2, 4)), (2, (3, 6))):
        for _ in range(passes):
            engine.backward(loss(engine, 1))
        engine.step()
        assert (engine.global_steps, engine.global_samples / engine.dp_world_size) == counted
    engine.backward(loss(engine, 1))
    engine.zero_grad()  # which keeps it, at stage 2
    engine.optimizer.zero_grad()  # that pass is of no step
    engine.backward(loss(engine, 1))
    with contextlib.suppress(ValueError):
        engine.backward(torch.ones(2))
    value = loss(engine, 1)
    engine.backward(value, retain_graph=True)
    engine.backward(value)
    engine.step()
    assert (engine.global_steps, engine.global_samples / engine.dp_world_size) == (4, 8)
    close(engine)
