"""A Booster's save or load on the master alone: each rank is told in what, and the program's own group is as it was."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import PeerError
from shardwise.testing import run_ranks
from tests.support.booster_setup import PLUGINS, Run
from tests.support.sets import full

Call = Callable[[Run, str], object]
CPU = torch.device("cpu")


def save_model(run: Run, folder: str) -> object:
    return run.booster.save_model(run.model, f"{folder}/alone.safetensors")


def save_beside(run: Run, folder: str) -> object:
    return run.booster.save_model(run.model, f"{folder}/beside.safetensors", use_async=True)


def save_optimizer(run: Run, folder: str) -> object:
    return run.booster.save_optimizer(run.optimizer, f"{folder}/alone.bin")


def save_schedule(run: Run, folder: str) -> object:
    return run.booster.save_lr_scheduler(run.scheduler, f"{folder}/alone.json")


def load_schedule(run: Run, folder: str) -> object:
    return run.booster.load_lr_scheduler(run.scheduler, f"{folder}/before.json")


def load_optimizer(run: Run, folder: str) -> object:
    return run.booster.load_optimizer(run.optimizer, f"{folder}/before.bin")


def load_model(run: Run, folder: str) -> object:
    return run.booster.load_model(run.model, f"{folder}/before.safetensors")


def train(run: Run, _: str) -> object:
    return run.steps(1, 2)


CALLS: dict[Call, str] = {
    save_model: "saving the model to ",
    save_beside: "saving the model to ",
    save_optimizer: "saving the optimizer to ",
    save_schedule: "saving the lr_scheduler to ",
    load_schedule: "loading the lr_scheduler from ",
    load_optimizer: "loading the optimizer from ",
    load_model: "loading the model from ",
}


def alone(plugin: str, first: Call, second: Call, folder: str) -> tuple[str, bool]:
    """Rank 0 makes the first call, rank 1 the second: what each is told, and whether their group works."""
    run = Run(PLUGINS[plugin]())
    run.steps(0, 1)
    run.booster.save_model(run.model, f"{folder}/before.safetensors")
    run.booster.save_optimizer(run.optimizer, f"{folder}/before.bin")
    run.booster.save_lr_scheduler(run.scheduler, f"{folder}/before.json")
    told = ""
    try:
        (first if dist.get_rank() == 0 else second)(run, folder)
    except PeerError as error:
        told = str(error)
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    return told, gathered == [{"rank": 0}, {"rank": 1}]


@pytest.mark.parametrize(
    "call",
    [
        *full(save_model),
        save_beside,
        *full(save_optimizer),
        save_schedule,
        *full(load_schedule),
        load_optimizer,
        *full(load_model),
    ],
)
def test_the_master_alone_in_a_call_and_a_rank_that_trains_on_are_told_at_once(call: Call, tmp_path: object) -> None:
    for told, works in run_ranks(2, alone, "gemini", call, train, str(tmp_path)):
        assert CALLS[call] in told and str(tmp_path) in told and works, told
    left = [name for name in os.listdir(str(tmp_path)) if not name.startswith("before")]
    assert left == (["alone.json"] if call is save_schedule else []), "a schedule is rank 0's own to write"
