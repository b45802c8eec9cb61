"""The Booster on two ranks against one plain process: every setting of its plugins, optimizers, and failing saves.

tests/ranks/front_ends has what each plugin has in common with other front-ends.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import TorchDDPPlugin
from shardwise.testing import run_ranks
from tests.support.booster_setup import PLUGINS, Run, assert_same, batch, plain
from tests.support.sets import full

RANKS = 2

# -- training equals one process, for a model with tied and frozen parameters


def _trains(name: str, no_sync: str) -> None:
    """Three passes a step; ``no_sync`` names the argument that ``Booster.no_sync`` gets in the first two."""
    run = Run(PLUGINS[name]())
    for step in range(3):
        with run.booster.no_sync(**{no_sync: getattr(run, no_sync)}) if no_sync else nullcontext():
            run.backward(step * 3)
            run.backward(step * 3 + 1)
        run.backward(step * 3 + 2)
        run.finish()
    assert_same(run.model.state_dict(), plain(3, passes=3))


@pytest.mark.parametrize(
    ("name", "no_sync"),
    [
        *(
            (name, "")
            for name in ("zero2-after-backward", "zero1-late", "gemini-offload", "gemini-kept", "gemini-half")
        ),
        *full(*((name, "") for name in ("fsdp-grad-op", "fsdp-no-shard", "fsdp-hybrid", "fsdp-offload"))),
        *full(*((name, "") for name in ("ddp", "zero2-offload", "gemini-replicas"))),
        *(("fsdp", "model"), ("zero1", "optimizer")),
        *full(("ddp", "model"), ("zero1", "model")),
    ],
)
def test_training_equals_one_process(name: str, no_sync: str) -> None:
    run_ranks(RANKS, _trains, name, no_sync)


def _no_sync_refused(name: str) -> None:
    run = Run(PLUGINS[name]())
    with pytest.raises(RuntimeError, match="accumulate by calling backward several times"):
        run.booster.no_sync(run.model, run.optimizer)


@pytest.mark.parametrize("name", ["zero2", *full("gemini")])
def test_no_sync_says_where_it_cannot_help(name: str) -> None:
    run_ranks(RANKS, _no_sync_refused, name)


# -- number formats


def _ddp_precision(name: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    booster = Booster(mixed_precision=name, plugin=TorchDDPPlugin())
    boosted, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    losses = []
    for _ in range(5):
        inputs, targets = (each[dist.get_rank() :: RANKS] for each in batch(0))
        output = boosted(inputs)
        assert output.dtype is {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
        loss = criterion(output, targets)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.weight.flatten().tolist()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_defect_8_mixed_precision_strings_work_with_ddp(name: str) -> None:
    (first, weights), (second, same) = run_ranks(RANKS, _ddp_precision, name)
    assert first[-1] < first[0] and second[-1] < second[0]
    assert weights == same


# -- failing saves and loads


def _another_boosters_optimizer(folder: str) -> None:
    run = Run(PLUGINS["zero2"]())
    run.steps(0, 1)
    other = Booster()
    other.save_optimizer(run.optimizer, Path(folder) / "optimizer.safetensors")
    other.load_optimizer(run.optimizer, Path(folder) / "optimizer.safetensors")
    run.steps(1, 3)
    assert_same(run.model.state_dict(), plain(3))


def test_another_booster_saves_and_loads_the_optimizer(tmp_path: Path) -> None:
    run_ranks(RANKS, _another_boosters_optimizer, str(tmp_path))


def _missing_on_one_rank(folder: str) -> str:
    run = Run(PLUGINS["gemini"]())
    file = Path(folder) / f"{'here' if dist.get_rank() == 0 else 'missing'}.safetensors"
    run.booster.save_model(run.model, Path(folder) / "here.safetensors")
    with pytest.raises(Exception) as error:
        run.booster.load_model(run.model, file)
    return type(error.value).__name__


def test_a_file_that_one_rank_cannot_read_is_an_error_everywhere(tmp_path: Path) -> None:
    assert run_ranks(RANKS, _missing_on_one_rank, str(tmp_path)) == ["CheckpointError"] * 2
