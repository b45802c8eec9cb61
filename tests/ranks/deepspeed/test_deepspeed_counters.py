"""What DeepSpeed's engine counts: samples of the passes that a step was made of, whoever says when it is due."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from tests.support.ds_setup import close, ds_config, start
from tests.support.on_ranks import on_ranks

RANKS, MICRO = 2, 3


def started(**changes: Any) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    return start(nn.Linear(4, 2), ds_config(2, MICRO, **changes))


def loss(engine: deepspeed.DeepSpeedEngine) -> Tensor:
    value: Tensor = engine(torch.ones(MICRO, 4)).square().mean()
    return value


def counts(engine: deepspeed.DeepSpeedEngine) -> list[float]:
    """Steps, and samples in micro-batches of all ranks."""
    return [engine.global_steps, engine.global_samples / (MICRO * RANKS)]


@on_ranks(RANKS)
def test_samples_are_those_of_the_passes_of_each_step() -> None:
    engine = started(managed_gradient_accumulation=False)
    seen = []
    for passes in (3, 1, 2):
        for _ in range(passes):
            engine.backward(loss(engine))
        engine.step()
        seen.append(counts(engine))
    engine.backward(loss(engine))
    engine.zero_grad()  # which keeps it, at stage 2
    engine.optimizer.zero_grad()  # that pass is of no step
    engine.backward(loss(engine))
    with contextlib.suppress(ValueError):
        engine.backward(torch.ones(2))
    value = loss(engine)
    engine.backward(value, retain_graph=True)
    engine.backward(value)
    engine.step()
    assert [*seen, counts(engine)] == [[1, 3], [2, 4], [3, 6], [4, 8]]
    close(engine)


@on_ranks(RANKS)
def test_samples_of_steps_whose_end_the_program_sets() -> None:
    engine = started(gradient_accumulation_steps=2)
    for _ in range(4):
        engine.backward(loss(engine))
        engine.step()
    seen = [counts(engine)]
    for passes_left in (2, 1, 0):
        engine.set_gradient_accumulation_boundary(passes_left == 0)
        engine.backward(loss(engine))
        engine.step()
    seen.append(counts(engine))
    for last in (False, False, False, True):  # one step for all of them
        engine.set_gradient_accumulation_boundary(last)
        if last:
            engine.scale(loss(engine)).backward()
        else:
            engine.backward(loss(engine))
    engine.step()
    assert [*seen, counts(engine)] == [[2, 4], [3, 7], [4, 11]]
    close(engine)


@on_ranks(RANKS)
@pytest.mark.parametrize("how", ["optimizer", "module", "engine", "failed"])
def test_passes_that_are_dropped_are_of_no_step(how: str) -> None:
    """Windows whose end the program sets, with two passes that it drops on its way."""
    engine = started(gradient_accumulation_steps=2, zero_optimization={"stage": 1 if how == "engine" else 2})

    def fail() -> None:
        value = loss(engine)
        value.register_hook(lambda grad: grad.item() + "")
        with warnings.catch_warnings(), pytest.raises(TypeError):
            warnings.simplefilter("ignore")
            engine.backward(value)

    drops = {"optimizer": engine.optimizer.zero_grad, "module": engine.module.zero_grad, "engine": engine.zero_grad}
    for step in range(2):
        engine.set_gradient_accumulation_boundary(False)
        for _ in range(2):
            engine.backward(loss(engine))
        drops.get(how, fail)()
        engine.backward(loss(engine))
        engine.set_gradient_accumulation_boundary(True)
        engine.scale(loss(engine)).backward()
        engine.step()
        assert counts(engine) == [step + 1, 2 * step + 2]
    close(engine)


@on_ranks(RANKS)
def test_losses_of_steps_are_means_over_their_passes(tmp_path: Path) -> None:
    """Of the first rank's passes, however these are made."""
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = started(gradient_accumulation_steps=4, csv_monitor=block)
    expected = []
    for how in ("backward", "scale", "undivided", "mixed"):
        mean = 0.0
        for turn in range(4):
            value = loss(engine) * (turn + 1)
            mean += value.item() / 4
            if how == "scale" or (how == "mixed" and turn % 2):
                engine.scale(value).backward()
            elif how == "undivided":  # the program does it
                engine.backward(value / 4, scale_wrt_gas=False)
            else:
                engine.backward(value)
            engine.step()
        expected.append(mean)
    close(engine)
    if torch.distributed.get_rank() == 0:
        lines = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text("utf-8").splitlines()[1:]
        assert [float(line.split(",")[1]) for line in lines] == pytest.approx(expected, rel=1e-6)
