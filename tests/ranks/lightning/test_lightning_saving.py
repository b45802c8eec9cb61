"""Checkpoints of a Trainer beyond directories: single files, weights alone, the background, random numbers, misuse.

Directories where Lightning expects a file, and torchmetrics under the strategies.
"""

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
import torchmetrics
from lightning_cases import STOCK, THREE, kinds, rows, strategy
from torch import Tensor, nn

import shardwise.fabric
from shardwise.core.checkpoint import Checkpointer, CheckpointError
from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.lightning import (
    DDPFullyShardedStrategy,
    ShardedPrecision,
    convert_zero_checkpoint_to_fp32_state_dict,
    to_single_file,
)
from shardwise.strategies.namespace import FABRIC, LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, close, data, fabric, fit, since, stock, toy, trainer, weights, worst
from tests.support.on_ranks import on_ranks, raises

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
    with warnings.catch_warnings(record=True, action="always") as said:
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
    raises(TypeError, "'act'", lambda: load(tmp_path / "one"))
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
    raises(ValueError, "a directory that all ranks mount", lambda: made.save_checkpoint("s3://bucket/x.ckpt"))
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


class Hyper(Toy):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.save_hyperparameters()  # type: ignore[attr-defined]


def directories_resumed(kind: str, path: str) -> dict[str, Tensor]:
    """A straight run of ddp, or one that begins under a strategy, and goes on under ddp from its directory."""
    arguments = {"accumulate_grad_batches": 2, "limit_train_batches": 4}
    made = trainer(strategy(kind), max_epochs=2 if kind == STOCK else 1, **arguments)
    made.fit(toy(body=Hyper, schedule=True, seed=8), data())
    if kind != STOCK:
        made.save_checkpoint(f"{path}/{kind}")
        close(made)
        made = trainer(strategy(STOCK), max_epochs=2, **arguments)
        made.fit(toy(body=Hyper, schedule=True, seed=9), data(), ckpt_path=f"{path}/{kind}")
        assert made.global_step == 4
    return weights(made)


@on_ranks(RANKS)
def test_ddp_of_fabric_goes_on_from_a_directory(tmp_path: Path) -> None:
    """Fabric's own data parallelism reads what ours saved."""
    own = fabric(shardwise.fabric.DDPFullyShardedStrategy(), FABRIC)
    model = nn.Linear(3, 3)
    sharded, optimizer = own.setup(model, torch.optim.Adam(model.parameters()))
    own.backward(sharded(torch.ones(1, 3)).sum())
    optimizer.step()
    own.save(f"{tmp_path}/fabric", {"net": sharded, "adam": optimizer, "epoch": 5})
    whole, moments = sharded.state_dict(), optimizer.state_dict()["state"][0]["exp_avg"].clone()
    own.strategy.unshard()
    own = fabric("ddp", FABRIC)
    again = nn.Linear(3, 3)
    plain, adam = own.setup(again, torch.optim.Adam(again.parameters()))
    state = {"net": plain, "adam": adam, "epoch": 0}
    assert own.load(f"{tmp_path}/fabric", state) == {} and state["epoch"] == 5
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())
    assert torch.equal(adam.state_dict()["state"][0]["exp_avg"], moments)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run_ranks(RANKS, directories_resumed, STOCK, str(tmp_path_factory.mktemp("straight")), timeout=180.0)[0]


@pytest.mark.parametrize("name", rows(THREE, [], ["fully_sharded"]))
def test_ddp_goes_on_from_a_directory(name: str, straight: dict[str, Tensor], tmp_path: Path) -> None:
    """As the straight run of ddp ends: weights, schedules, moments and counters; and one process loads the module."""
    ended = run_ranks(RANKS, directories_resumed, name, str(tmp_path), timeout=180.0)[0]
    assert all(float((value - straight[key]).abs().max()) < 1e-6 for key, value in ended.items())
    kind = type(toy(body=Hyper))
    model = kind.load_from_checkpoint(tmp_path / name, map_location="cpu")
    file = to_single_file(tmp_path / name, tmp_path / "one.ckpt", optimizers=True)
    assert model.seed == 8 and len(file["optimizer_states"]) == 1
    assert all(torch.equal(value, file["state_dict"][n]) for n, value in model.state_dict().items())
    again = kind.load_from_checkpoint(tmp_path / "one.ckpt", seed=3)
    assert again.seed == 3 and torch.equal(again.net[0].weight, model.net[0].weight)
    found = convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "fp32.pt", tag=name)
    assert found["state_dict"].keys() == torch.load(tmp_path / "fp32.pt", weights_only=False)["state_dict"].keys()
    same = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / name, tmp_path / "own.pt")["state_dict"]
    assert all(torch.equal(value, same[key]) for key, value in found["state_dict"].items())
    with pytest.raises(FileNotFoundError, match="with tag='none': no such directory"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "fp32.pt", tag="none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no checkpoint"):
        kind.load_from_checkpoint(tmp_path / "empty")


class Measured(Toy):
    """A metric from the constructor, whose state is kept in checkpoints, and one from ``configure_model``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.kept = torchmetrics.SumMetric()
        self.kept.persistent(True)
        self.errors: Any = None

    def configure_model(self) -> None:
        self.build()
        if self.errors is None:
            self.errors = torchmetrics.MetricCollection(
                {"mean": torchmetrics.MeanMetric(), "r2": torchmetrics.MeanSquaredError()}
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self(batch[0])  # type: ignore[operator]
        self.errors["r2"](output.detach(), batch[1])
        self.errors["mean"](output.detach() * (dist.get_rank() + 1))
        self.kept.update(float(dist.get_rank() + 1))
        for name in ("r2", "mean"):
            self.log(name, self.errors[name], on_epoch=True)  # type: ignore[attr-defined]
        return nn.functional.mse_loss(output, batch[1])


def measured(kind: str, path: str) -> tuple[dict[str, float], list[float]]:
    made = trainer(strategy(kind), max_epochs=1)
    model = toy(body=Measured)
    made.fit(model, data())
    kept = [float(model.kept.sum_value), float(model.kept.compute())]
    assert model.errors["r2"].device == made.strategy.root_device
    made.save_checkpoint(f"{path}/{kind}")
    found = {name: float(value) for name, value in made.callback_metrics.items()}
    if kind != STOCK:
        close(made)
    made = trainer(strategy(kind), max_epochs=1)
    model = toy(body=Measured)
    made.fit(model, data(), ckpt_path=f"{path}/{kind}")
    kept.append(float(model.kept.sum_value))
    if kind != STOCK:
        close(made)
    return found, kept


Logged = tuple[dict[str, float], list[float]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Logged]:
    return run_ranks(RANKS, measured, STOCK, str(tmp_path_factory.mktemp("measured")))


@pytest.mark.parametrize("kind", kinds("colossalai"))
def test_metrics_of_ranks_are_put_together(kind: str, expected: list[Logged], tmp_path: Path) -> None:
    """The values that ddp logs, on both ranks; a kept state is each rank's own in a directory."""
    assert expected[0][0]["mean_epoch"] != 0.0
    for rank, (found, kept) in enumerate(run_ranks(RANKS, measured, kind, str(tmp_path))):
        assert found.keys() == expected[rank][0].keys()
        assert all(abs(found[name] - value) < 1e-5 for name, value in expected[rank][0].items())
        assert kept[:2] == expected[rank][1][:2] == [4.0 * (rank + 1), 12.0]
        assert kept[2] == kept[0], "each rank's own"
