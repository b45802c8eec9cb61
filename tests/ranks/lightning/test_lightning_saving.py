"""Checkpoints of a Trainer beyond directories: single files, weights alone, the background, random numbers, misuse."""

from __future__ import annotations

import functools
import inspect
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.lightning import DDPFullyShardedStrategy, ShardedPrecision, to_single_file
from shardwise.strategies.namespace import LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, close, data, fit, since, stock, toy, trainer, weights, worst

RANKS = 2
Strategy = DDPFullyShardedStrategy


class Dropping(Toy):
    """With dropout, so that the random numbers matter, and a buffer."""

    def build(self) -> None:
        super().build()
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.dropout(inputs))


def saver(path: str, **arguments: Any) -> Any:
    return LIGHTNING.load("callbacks.ModelCheckpoint")(dirpath=path, **arguments)


def resumed(path: str) -> tuple[float, list[float]]:
    """fp16 with its loss scale and dropout, in one run and in two."""

    def run(start: str | None = None) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(5 + dist.get_rank())
        keep = saver(path, save_top_k=-1, filename="{epoch}")
        strategy = Strategy(precision_plugin=ShardedPrecision("16-mixed"), cpu_offload=True)
        made = trainer(strategy, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
        made.fit(toy(body=Dropping, schedule=True), data(5), ckpt_path=start)
        found = weights(made), made.optimizers[0].scaler.scale
        close(made)
        return found

    (one, scale), (other, again) = run(), run(f"{path}/epoch=0.ckpt")
    return worst(one, other), [scale, again, float(one["calls"])]


def test_random_numbers_and_loss_scale_are_restored(tmp_path: Path) -> None:
    for difference, (scale, again, calls) in run_ranks(RANKS, resumed, str(tmp_path)):
        assert scale == again and calls == 10
        assert difference == 0.0 or not since(2, 5), "older versions draw once more when a run resumes"


class Described(Toy):
    """Hyperparameters of many classes, one of which is no data."""

    def __init__(self, act: Any, folder: Path, options: Namespace, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.folder, self.options = folder, options
        self.save_hyperparameters()  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"seen": {1, 2}, "rate": np.float32(0.1), "array": np.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = checkpoint["own"]


def described() -> Any:
    return toy(body=Described, act=nn.ReLU(), folder=Path("a"), options=Namespace(sizes={3}, dtype=torch.bfloat16))


def save_described(path: str) -> tuple[int, bool]:
    made = trainer(Strategy())
    made.fit(described(), data())
    with pytest.warns(UserWarning, match="checkpoints are without hyper_parameters/act: nothing in them is pickled"):
        made.save_checkpoint(f"{path}/one.ckpt")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made.save_checkpoint(f"{path}/one.ckpt")
    close(made)
    other, model = trainer(Strategy(), max_epochs=2), described()
    other.fit(model, data(), ckpt_path=f"{path}/one.ckpt")
    close(other)
    own = model.own
    same = own["seen"] == {1, 2} and own["rate"] == float(np.float32(0.1)) and own["array"].tolist() == [0, 1, 2]
    return sum("are without" in str(each.message) for each in said), same


def test_what_is_no_data_is_left_out_of_the_hyperparameters(tmp_path: Path) -> None:
    assert run_ranks(RANKS, save_described, str(tmp_path)) == [(0, True)] * RANKS
    files = sorted((tmp_path / "one.ckpt").iterdir())
    assert [file.suffix for file in files] == [".json", *[".safetensors"] * RANKS]
    assert not any(mark in file.read_bytes() for file in files for mark in (b"PK\x03\x04", b"ReLU", b"\x80\x02}"))
    with pytest.warns(UserWarning, match="was saved without hyper_parameters/act: give these hyperparameters"):
        to_single_file(tmp_path / "one.ckpt", tmp_path / "one")
    load = type(described()).load_from_checkpoint
    if "weights_only" in inspect.signature(load).parameters:
        load = functools.partial(load, weights_only=False)
    elif not since(2, 4):  # it reads what torch takes for data alone
        return
    with pytest.raises(TypeError, match="'act'"):
        load(tmp_path / "one")
    model = load(tmp_path / "one", act=nn.ReLU())
    assert model.folder == Path("a") and model.options == Namespace(sizes={3}, dtype=torch.bfloat16)


def weights_only(path: str) -> tuple[float, int]:
    keep = saver(path, save_weights_only=True, filename="w")
    made = trainer(Strategy(), callbacks=[keep], enable_checkpointing=True)
    made.fit(toy(), data())
    expected = weights(made)
    close(made)
    other = trainer(Strategy())
    other.validate(toy(seed=9), data(), ckpt_path=f"{path}/w.ckpt", verbose=False)
    difference = worst(expected, weights(other))
    generator = torch.get_rng_state()
    other.strategy.load_checkpoint(f"{path}/w.ckpt")
    assert torch.equal(torch.get_rng_state(), generator)  # evaluation leaves the random numbers alone
    close(other)
    again = trainer(Strategy(), max_epochs=2)
    with pytest.warns(UserWarning, match="holds weights only: optimizers and schedulers start from"):
        again.fit(toy(seed=9, schedule=True), data(), ckpt_path=f"{path}/w.ckpt")
    steps = again.global_step
    close(again)
    return difference, steps


def test_save_weights_only(tmp_path: Path) -> None:
    assert run_ranks(RANKS, weights_only, str(tmp_path)) == [(0.0, 8)] * RANKS
    names = open_checkpoint(str(tmp_path / "w.ckpt")).tensors()
    assert "model/net.0.weight" in names and not any(name.startswith("optimizer/") for name in names)


def from_weights(path: str) -> tuple[float, int]:
    """A Hugging Face directory to begin with."""
    made = trainer(Strategy(), max_epochs=1)
    with pytest.warns(UserWarning, match="holds weights only: optimizers and counters start from"):
        made.fit(toy(seed=9), data(), ckpt_path=path)
    found, steps = weights(made), made.global_step
    close(made)
    return worst(found, fit(stock(), toy())), steps


def test_training_begins_with_weights_of_another_format(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = toy()
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    for difference, steps in run_ranks(RANKS, from_weights, str(tmp_path)):
        assert difference <= 1e-6 and steps == 4


def through_io(path: str) -> dict[str, float]:
    """A ``checkpoint_io`` gives single files that stock Lightning goes on from, and so do ours."""

    class Io(LIGHTNING.load("plugins.io.TorchCheckpointIO")):  # type: ignore[misc]
        pass

    def go_on(strategy: Any) -> dict[str, Tensor]:
        return fit(strategy, toy(schedule=True), max_epochs=2, ckpt_path=f"{path}/file.ckpt")

    first = trainer(Strategy(checkpoint_io=Io()))
    first.fit(toy(schedule=True), data())
    first.save_checkpoint(f"{path}/file.ckpt")
    close(first)
    assert Path(path, "file.ckpt").is_file()
    expected = go_on(stock())
    straight = fit(stock(), toy(schedule=True), max_epochs=2)
    return {
        "stock from ours": worst(straight, expected),
        "ours from it": worst(expected, go_on(Strategy())),
        "ours, other plan": worst(expected, go_on(Strategy(cpu_offload=True, flatten_parameters=False))),
    }


@pytest.mark.full
def test_single_files_through_a_checkpoint_io(tmp_path: Path) -> None:
    for found in run_ranks(RANKS, through_io, str(tmp_path)):
        assert all(value <= 1e-6 for value in found.values()), found


def asynchronous(path: str) -> tuple[float, list[bool]]:
    seen, plain = [], Checkpointer.save

    def noting(*args: Any, **kwargs: Any) -> str:
        seen.append(kwargs["use_async"])
        return plain(*args, **kwargs)

    io = LIGHTNING.load("plugins.io.AsyncCheckpointIO")()
    keep = saver(path, save_top_k=-1, filename="{epoch}")
    made = trainer(Strategy(), max_epochs=2, callbacks=[keep], enable_checkpointing=True, plugins=[io])
    Checkpointer.save = noting  # type: ignore[method-assign,assignment]
    try:
        made.fit(toy(), data())
    finally:
        Checkpointer.save = plain  # type: ignore[method-assign]
    expected = weights(made)
    close(made)
    other = trainer(Strategy())
    other.test(toy(), data(), ckpt_path=f"{path}/epoch=1.ckpt", verbose=False)
    found = worst(expected, weights(other))
    close(other)
    return found, seen


def test_asynchronous_saving(tmp_path: Path) -> None:
    assert run_ranks(RANKS, asynchronous, str(tmp_path)) == [(0.0, [True, True])] * RANKS


def finder(path: str, make: Callable[[], Any]) -> tuple[list[str], dict[str, Tensor]]:
    """The learning-rate finder saves, trains, restores and removes."""
    made = trainer(
        make(),
        callbacks=[LIGHTNING.load("callbacks.LearningRateFinder")(num_training_steps=5, update_attr=False)],
        default_root_dir=path,
        enable_checkpointing=True,
    )
    made.fit(toy(), data(8))
    found = weights(made)
    close(made)
    return [p.name for p in Path(path).glob(".lr_find*")], found


def unsearched() -> dict[str, Tensor]:
    return fit(stock(), toy(), loader=data(8))


@pytest.mark.full
def test_learning_rate_finder_leaves_nothing_changed(tmp_path: Path) -> None:
    expected = run_ranks(RANKS, finder, str(tmp_path), stock)[0][1]
    for left, found in run_ranks(RANKS, finder, str(tmp_path), Strategy):
        assert left == [] and worst(found, expected) <= 1e-6
    # Before 2.5 Lightning goes on after the batches of the search, under ddp too.
    assert worst(expected, run_ranks(RANKS, unsearched)[0]) <= 1e-6 or not since(2, 5)


class Unsaveable(Toy):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["entry"] = lambda: None


class Changing(Toy):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.bias"]


def wrong(path: str) -> None:
    made = trainer(Strategy())
    made.fit(toy(body=Changing), data())
    with pytest.raises(TypeError, match="give the strategy a checkpoint_io"):
        made.save_checkpoint(f"{path}/x.ckpt", storage_options={"a": 1})
    with pytest.raises(ValueError, match="a directory that all ranks mount"):
        made.save_checkpoint("s3://bucket/x.ckpt")
    with pytest.warns(UserWarning, match="on_save_checkpoint changed state_dict"):
        made.save_checkpoint(f"{path}/x.ckpt")
    close(made)
    made = trainer(Strategy())
    made.fit(toy(body=Unsaveable), data())
    with pytest.raises(CheckpointError, match=r"rank 0 could not put together .*entry entry is a builtins.function"):
        made.save_checkpoint(f"{path}/y.ckpt")
    assert not Path(f"{path}/y.ckpt").exists()
    close(made)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        trainer(Strategy()).test(toy(), data(), ckpt_path=f"{path}/..", verbose=False)
    model = toy()
    model.net[4] = nn.Linear(16, 5)
    with pytest.raises(ValueError, match=r"net.4.weight: \(3, 16\) in the checkpoint, \(5, 16\) in the model"):
        trainer(Strategy()).test(model, data(), ckpt_path=f"{path}/x.ckpt", verbose=False)


@pytest.mark.full
def test_wrong_uses(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    run_ranks(RANKS, wrong, str(tmp_path / "inner"))
