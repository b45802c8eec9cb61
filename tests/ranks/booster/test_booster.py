"""The Booster on two ranks: training equals one plain process under every plugin, and saves fail on every rank.

A failed save, synchronous or asynchronous, raises on every rank and leaves what was saved before. The wrappers of
models and optimizers have ColossalAI's published methods. Tests that several front-ends share: tests/ranks/front_ends.
"""

import math
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.core.checkpoint import CheckpointError
from shardwise.core.checkpoint.formats import huggingface
from shardwise.core.comm import PeerError
from shardwise.testing import assert_close
from tests.support.booster_setup import PLUGINS, Run, assert_same, batch, load, plain, save, start
from tests.support.on_ranks import everywhere, on_ranks, raises
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
    """Each step has three passes; ``no_sync`` names the argument of ``Booster.no_sync`` in the first two."""
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
def test_no_sync_is_refused_where_it_has_no_effect(name: str) -> None:
    run = Run(PLUGINS[name]())
    raises(RuntimeError, "accumulate by calling backward several times", run.booster.no_sync, run.model, run.optimizer)


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


@on_ranks(RANKS)
def test_unreadable_file_on_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    run = Run(PLUGINS["gemini"]())
    run.booster.save_model(run.model, tmp_path / "here.safetensors")
    file = tmp_path / f"{'here' if dist.get_rank() == 0 else 'missing'}.safetensors"
    raises(CheckpointError, None, run.booster.load_model, run.model, file)


CALLS: dict[str, Callable[[Run, str], object]] = {
    "saving the model to ": lambda run, to: run.booster.save_model(run.model, f"{to}/alone.safetensors"),
    "saving the model to": lambda run, to: run.booster.save_model(run.model, f"{to}/b.safetensors", use_async=True),
    "saving the optimizer to ": lambda run, to: run.booster.save_optimizer(run.optimizer, f"{to}/alone.bin"),
    "saving the lr_scheduler to ": lambda run, to: run.booster.save_lr_scheduler(run.scheduler, f"{to}/alone.json"),
    "loading the lr_scheduler from ": lambda run, to: run.booster.load_lr_scheduler(run.scheduler, f"{to}/before.json"),
    "loading the optimizer from ": lambda run, to: run.booster.load_optimizer(run.optimizer, f"{to}/before.bin"),
    "loading the model from ": lambda run, to: run.booster.load_model(run.model, f"{to}/before.safetensors"),
}
"""Calls by the words of the error that they raise; the second call is asynchronous."""
QUICK_CALLS = ("saving the model to", "saving the lr_scheduler to ", "loading the optimizer from ")


@on_ranks(RANKS)
@pytest.mark.parametrize("call", [*QUICK_CALLS, *full(*(call for call in CALLS if call not in QUICK_CALLS))])
def test_collective_call_on_rank_0_alone_raises_on_all_ranks(call: str, tmp_path: Path) -> None:
    """Only rank 0 makes the call: both ranks raise an error that names it, and the process group still works."""
    run = Run(PLUGINS["gemini"]())
    run.steps(0, 1)
    run.booster.save_model(run.model, tmp_path / "before.safetensors")
    run.booster.save_optimizer(run.optimizer, tmp_path / "before.bin")
    run.booster.save_lr_scheduler(run.scheduler, tmp_path / "before.json")
    first = dist.get_rank() == 0
    told = raises(PeerError, call, lambda: CALLS[call](run, str(tmp_path)) if first else run.steps(1, 2))
    assert str(tmp_path) in told
    assert everywhere(dist.get_rank()) == [0, 1]
    left = [name for name in os.listdir(tmp_path) if not name.startswith("before")]
    assert left == (["alone.json"] if "saving the lr_scheduler" in call else []), "a schedule is rank 0's own to write"


# -- asynchronous saves


@on_ranks(RANKS)
@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.campaign), *full("fsdp"), "gemini"])
def test_asynchronous_saves(name: str, tmp_path: Path) -> None:
    run = Run(PLUGINS[name]())
    run.steps(0, 2)
    go, write = threading.Event(), huggingface.write_safetensors_stream

    def held(*place: Any) -> int:
        assert go.wait(60)
        return write(*place)

    with mock.patch.object(huggingface, "write_safetensors_stream", held):
        save(run, tmp_path, use_async=True)
        run.steps(2, 4)
        assert run.booster._files.saving and not (tmp_path / "model").exists(), "training went on"
        threading.Timer(0.2, go.set).start()
        run.booster.save_model(run.model, tmp_path / "later", shard=True, use_async=True)
        assert dist.get_rank() != 0 or (tmp_path / "model").exists(), "a save that still runs is waited for"
        run.booster.wait()
    dist.barrier()
    again = Run(PLUGINS[name](), seed=99)
    load(again, tmp_path)
    assert_same(again.model.state_dict(), plain(2))
    again.steps(2, 4)
    assert_same(again.model.state_dict(), plain(4))
    again.booster.load_model(again.model, tmp_path / "later")
    assert_same(again.model.state_dict(), plain(4))


@on_ranks(RANKS)
def test_failed_asynchronous_save_raises_on_all_ranks(tmp_path: Path) -> None:
    run = Run(PLUGINS["gemini"]())
    (tmp_path / "file").touch()
    run.booster.save_model(run.model, tmp_path / "file" / "m.safetensors", use_async=True)
    with pytest.raises(CheckpointError, match=r"asynchronous save failed[\s\S]*rank 0 could not save the model"):
        run.booster.save_model(run.model, tmp_path / "m.safetensors", use_async=True)
    run.booster.save_model(run.model, tmp_path / "m.safetensors", use_async=True)
    run.steps(0, 1)
    run.booster.wait()
    assert (tmp_path / "m.safetensors").is_file()


ENGINE = ("zero1", "zero2", "gemini")


def _run(plugin: Any, precision: str | None = None) -> tuple[Booster, nn.Module, Any, Any]:
    model, optimizer, _ = start()
    booster = Booster(plugin=plugin, mixed_precision=precision)
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    inputs, targets = batch(0)
    booster.backward(nn.functional.mse_loss(boosted(inputs).float(), targets), wrapped)
    return booster, boosted, wrapped, optimizer


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", *full("zero1", "gemini")])
def test_wrappers_have_the_published_methods(name: str) -> None:
    booster, model, wrapped, optimizer = _run(PLUGINS[name]())
    assert wrapped.optim is optimizer and wrapped.unwrap() is optimizer
    assert [id(p) for p in wrapped.parameters] == [id(p) for g in wrapped.param_groups for p in g["params"]] != []
    assert model.unwrap(unwrap_peft=False) is model.unwrap(True) is model.unwrap()
    assert wrapped.get_grad_norm(2.0) is None
    wrapped.clip_grad_by_value(0.5)
    clipped = float(wrapped.clip_grad_by_norm(0.1, norm_type=2.0, error_if_nonfinite=True))
    wrapped.step()
    assert clipped > 0.1
    assert wrapped.get_grad_norm(norm_type=2.0) == pytest.approx(clipped, rel=1e-4)
    raises(ValueError, "^norm_type=3.0: .*p=2", wrapped.get_grad_norm, 3.0)
    outer = "BoostedOptimizer" if name in ENGINE else "Optimizer"
    said = raises(AttributeError, "nor has the AdamW in it", lambda: wrapped.nothing_like_it)
    assert outer in said and "'nothing_like_it'" in said
    said = raises(AttributeError, "Net in it", lambda: model.nothing_like_it)
    assert not said.startswith("'Net'"), said
    booster.close()


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    entries = {f"{i}.{key}": value for i, entry in state["state"].items() for key, value in entry.items()}
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}


@on_ranks(RANKS)
@pytest.mark.parametrize("name", ["zero2", *full("zero1", "gemini")])
def test_state_dict_with_only_rank_0(name: str) -> None:
    booster, model, wrapped, _ = _run(PLUGINS[name]())
    wrapped.step()
    whole, alone = model.state_dict(), model.state_dict(only_rank_0=True)
    every, first, default = (wrapped.state_dict(**only) for only in ({"only_rank_0": False}, {"only_rank_0": True}, {}))
    assert every["param_groups"] == default["param_groups"] == first["param_groups"] and len(_tensors(every)) > 10
    assert_close(_tensors(every), _tensors(default), rtol=0.0, what="only_rank_0=False")
    if dist.get_rank() == 0:
        assert list(alone) == list(whole)
        assert_close(_tensors(first), _tensors(every), rtol=0.0, what="rank 0's")
    else:
        assert first["state"] == {} == alone
    given: dict[str, Any] = {"mine": torch.ones(1)}
    assert model.state_dict(destination=given, prefix="a.") is given and "mine" in given
    values = {key: value for key, value in whole.items() if isinstance(value, torch.Tensor)}
    for state, prefix in ((given, "a."), (nn.ModuleDict({"part": model}).state_dict(), "part.")):
        there = {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
        assert list(there) == list(whole)
        assert_close({key: there[key] for key in values}, values, rtol=0.0, what=prefix)
    raises(ValueError, r"state_dict\(keep_vars=True\)", lambda: model.state_dict(keep_vars=True))
    booster.close()


@on_ranks(RANKS)
def test_clipping_raises_on_a_nonfinite_norm_if_requested() -> None:
    booster, model, wrapped, _ = _run(LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=1024.0))
    assert wrapped.loss_scale == 1024.0
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    gradient.mul_(math.inf if dist.get_rank() == 1 else 1.0)
    for norm_type in (0.0, -1.0, math.nan):
        raises(ValueError, "give p > 0", wrapped.clip_grad_by_norm, 1.0, norm_type)
    words = r"^clip_grad_by_norm\(1.0\): the norm of the gradients is (inf|nan)"
    raises(RuntimeError, words, lambda: wrapped.clip_grad_by_norm(1.0, error_if_nonfinite=True))
    assert not math.isfinite(wrapped.clip_grad_by_norm(1.0))
    wrapped.step()
    assert wrapped.last_step_skipped
    booster.close()
