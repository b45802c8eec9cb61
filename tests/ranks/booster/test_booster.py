"""The Booster on two ranks against one plain process: every setting of its plugins, optimizers, and failing saves.

tests/ranks/front_ends has what each plugin has in common with other front-ends.

A Booster's save or load on the master alone: each rank is told in what, and the program's own group is as it was.
What goes wrong while the Booster saves on two ranks, at once or in the background: every rank is told, and what was
saved before is still there.
What ColossalAI's wrappers of models and optimizers offer, under every plugin; and who lacks what is not there.
"""

import math
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.core.checkpoint import CheckpointError
from shardwise.core.checkpoint.formats import huggingface
from shardwise.core.comm import PeerError
from shardwise.testing import assert_close, run_ranks
from tests.support.booster_setup import PLUGINS, Run, assert_same, batch, load, plain, save, start
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

RANKS = 2

# -- training equals one process, for a model with tied and frozen parameters


@on_ranks(RANKS)
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
    """Three passes a step; ``no_sync`` names the argument that ``Booster.no_sync`` gets in the first two."""
    run = Run(PLUGINS[name]())
    for step in range(3):
        with run.booster.no_sync(**{no_sync: getattr(run, no_sync)}) if no_sync else nullcontext():
            run.backward(step * 3)
            run.backward(step * 3 + 1)
        run.backward(step * 3 + 2)
        run.finish()
    assert_same(run.model.state_dict(), plain(3, passes=3))


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["zero2", *full("gemini")])
def test_no_sync_says_where_it_cannot_help(name: str) -> None:
    run = Run(PLUGINS[name]())
    raises(RuntimeError, "accumulate by calling backward several times", run.booster.no_sync, run.model, run.optimizer)


# -- number formats


# -- failing saves and loads


@on_ranks(RANKS)
def test_another_booster_saves_and_loads_the_optimizer(tmp_path: Path) -> None:
    run = Run(PLUGINS["zero2"]())
    run.steps(0, 1)
    other = Booster()
    other.save_optimizer(run.optimizer, tmp_path / "optimizer.safetensors")
    other.load_optimizer(run.optimizer, tmp_path / "optimizer.safetensors")
    run.steps(1, 3)
    assert_same(run.model.state_dict(), plain(3))


def _missing_on_one_rank(folder: str) -> str:
    run = Run(PLUGINS["gemini"]())
    file = Path(folder) / f"{'here' if dist.get_rank() == 0 else 'missing'}.safetensors"
    run.booster.save_model(run.model, Path(folder) / "here.safetensors")
    with pytest.raises(Exception) as error:
        run.booster.load_model(run.model, file)
    return type(error.value).__name__


def test_a_file_that_one_rank_cannot_read_is_an_error_everywhere(tmp_path: Path) -> None:
    assert run_ranks(RANKS, _missing_on_one_rank, str(tmp_path)) == ["CheckpointError"] * 2


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


# -- asynchronous


@on_ranks(RANKS)
@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.campaign), *full("fsdp"), "gemini"])
def test_asynchronous_saves(name: str, tmp_path: Path) -> None:
    run = Run(PLUGINS[name]())
    run.steps(0, 2)
    go, path = threading.Event(), tmp_path
    write = huggingface.write_safetensors_stream

    def held(*place: Any) -> int:
        assert go.wait(60)
        return write(*place)

    huggingface.write_safetensors_stream = held
    try:
        save(run, path, use_async=True)
        run.steps(2, 4)
        assert run.booster._files.saving and not (path / "model").exists(), "training went on"
        threading.Timer(0.2, go.set).start()
        run.booster.save_model(run.model, path / "later", shard=True, use_async=True)
        assert dist.get_rank() != 0 or (path / "model").exists(), "a save that still runs is waited for"
        run.booster.wait()
    finally:
        huggingface.write_safetensors_stream = write
    dist.barrier()
    again = Run(PLUGINS[name](), seed=99)
    load(again, path)
    assert_same(again.model.state_dict(), plain(2))
    again.steps(2, 4)
    assert_same(again.model.state_dict(), plain(4))
    again.booster.load_model(again.model, path / "later")
    assert_same(again.model.state_dict(), plain(4))


def _async_failure(folder: str) -> str:
    run = Run(PLUGINS["gemini"]())
    (Path(folder) / "file").touch()
    run.booster.save_model(run.model, Path(folder) / "file" / "m.safetensors", use_async=True)
    with pytest.raises(CheckpointError) as error:
        run.booster.save_model(run.model, Path(folder) / "m.safetensors", use_async=True)
    run.booster.save_model(run.model, Path(folder) / "m.safetensors", use_async=True)
    run.steps(0, 1)
    run.booster.wait()
    return str(error.value)


def test_a_failed_asynchronous_save_is_told_to_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(RANKS, _async_failure, str(tmp_path)):
        assert "asynchronous save failed" in message and "rank 0 could not save the model" in message
    assert (tmp_path / "m.safetensors").is_file()


ENGINE = ("zero1", "zero2", "gemini")


def _run(plugin: Any, precision: str | None = None) -> tuple[Booster, nn.Module, Any, Any]:
    model, optimizer, _ = start()
    booster = Booster(plugin=plugin, mixed_precision=precision)
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    inputs, targets = batch(0)
    booster.backward(nn.functional.mse_loss(boosted(inputs).float(), targets), wrapped)
    return booster, boosted, wrapped, optimizer


def _methods(name: str) -> dict[str, Any]:
    booster, model, wrapped, optimizer = _run(PLUGINS[name]())
    assert wrapped.optim is optimizer and wrapped.unwrap() is optimizer
    assert [id(p) for p in wrapped.parameters] == [id(p) for g in wrapped.param_groups for p in g["params"]] != []
    assert model.unwrap(unwrap_peft=False) is model.unwrap(True) is model.unwrap()
    before = wrapped.get_grad_norm(2.0)
    wrapped.clip_grad_by_value(0.5)
    clipped = float(wrapped.clip_grad_by_norm(0.1, norm_type=2.0, error_if_nonfinite=True))
    wrapped.step()
    norm = wrapped.get_grad_norm(norm_type=2.0)
    said = []
    for call in (lambda: wrapped.get_grad_norm(3.0), lambda: wrapped.nothing_like_it, lambda: model.nothing_like_it):
        error = raises((ValueError, AttributeError), None, call)
        said.append(error)
    booster.close()
    return {"before": before, "clipped": clipped, "norm": norm, "said": said}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", *full("zero1", "gemini")])
def test_the_published_methods_are_there(name: str) -> None:
    for found in run_ranks(RANKS, _methods, name):
        assert found["before"] is None and found["clipped"] > 0.1
        # The engine tells the norm of what step() applies, the wrappers of torch that of the last clipping.
        assert found["norm"] == pytest.approx(0.1 if name in ENGINE else found["clipped"], rel=1e-4)
        norm, optimizer, model = found["said"]
        assert norm.startswith("norm_type=3.0: ") and "p=2" in norm
        outer = "BoostedOptimizer" if name in ENGINE else "Optimizer"
        assert outer in optimizer and "nor has the AdamW in it" in optimizer and "'nothing_like_it'" in optimizer
        assert "Net in it" in model and not model.startswith("'Net'"), model


def _states(name: str) -> dict[str, Any]:
    booster, model, wrapped, _ = _run(PLUGINS[name]())
    wrapped.step()
    found = {
        "model": [model.state_dict(), model.state_dict(only_rank_0=True)],
        "optimizer": [
            wrapped.state_dict(only_rank_0=False),
            wrapped.state_dict(only_rank_0=True),
            wrapped.state_dict(),
        ],
    }
    given: dict[str, Any] = {"mine": torch.ones(1)}
    assert model.state_dict(destination=given, prefix="a.") is given
    found["destination"] = given
    found["parent"] = nn.ModuleDict({"part": model}).state_dict()
    raises(ValueError, r"state_dict\(keep_vars=True\)", lambda: model.state_dict(keep_vars=True))
    booster.close()
    return found


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    entries = {f"{i}.{key}": value for i, entry in state["state"].items() for key, value in entry.items()}
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["zero2", *full("zero1", "gemini")])
def test_a_state_can_be_rank_0s_alone(name: str) -> None:
    first, second = run_ranks(RANKS, _states, name)
    for found in (first, second):
        full, _, default = found["optimizer"]
        assert full["param_groups"] == default["param_groups"] and len(_tensors(full)) > 10
        assert_close(_tensors(full), _tensors(default), rtol=0.0, what="only_rank_0=False")
        values = {key: value for key, value in found["model"][0].items() if isinstance(value, torch.Tensor)}
        for where, prefix in (("destination", "a."), ("parent", "part.")):
            there = {key.removeprefix(prefix): v for key, v in found[where].items() if key.startswith(prefix)}
            assert list(there) == list(found["model"][0])
            assert_close({key: there[key] for key in values}, values, rtol=0.0, what=where)
        assert "mine" in found["destination"]
    assert_close(_tensors(first["optimizer"][1]), _tensors(first["optimizer"][0]), rtol=0.0, what="rank 0's")
    assert list(first["model"][1]) == list(first["model"][0])
    assert second["optimizer"][1]["state"] == {} == second["model"][1]
    assert second["optimizer"][1]["param_groups"] == first["optimizer"][1]["param_groups"]


def _overflowing() -> list[Any]:
    booster, model, wrapped, _ = _run(LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=1024.0))
    found: list[Any] = [wrapped.loss_scale]
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(math.inf)
    else:
        next(p for p in model.parameters() if p.grad is not None).grad.mul_(1.0)
    for norm_type in (0.0, -1.0, math.nan):
        raises(ValueError, "give p > 0", wrapped.clip_grad_by_norm, 1.0, norm_type)
    error = raises(RuntimeError, None, lambda: wrapped.clip_grad_by_norm(1.0, error_if_nonfinite=True))
    found.append(error)
    found.append(wrapped.clip_grad_by_norm(1.0))
    wrapped.step()
    booster.close()
    return [*found, wrapped.last_step_skipped]


def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for() -> None:
    for scale, said, norm, skipped in run_ranks(RANKS, _overflowing):
        assert scale == 1024.0 and skipped
        assert said.startswith("clip_grad_by_norm(1.0): the norm of the gradients is inf")
        assert norm == math.inf
