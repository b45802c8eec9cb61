"""Saving by a Trainer: single files, weights only, asynchronous saving, random numbers, hyperparameters, and errors.

Also directories where Lightning expects a file, and states of torchmetrics.
"""

import functools
import inspect
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback
from lightning_cases import STOCK, THREE, ended, kinds, rows, strategy
from safetensors.torch import save_file
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
from shardwise.strategies.lightning_packages import FABRIC, LIGHTNING
from shardwise.testing import assert_close, run_ranks
from tests.support.lightning_setup import OUT, Toy, close, data, fabric, fit, since, stock, toy, trainer, weights, worst
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

RANKS = 2
Strategy = DDPFullyShardedStrategy


class Dropping(Toy):
    """A model with dropout, which shows its random numbers, and a buffer."""

    def build(self) -> None:
        super().build()
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.dropout(inputs))


def saver(path: str, **arguments: Any) -> Any:
    return LIGHTNING.load("callbacks.ModelCheckpoint")(dirpath=path, **arguments)


@on_ranks(RANKS)
def test_random_numbers_and_loss_scale_are_restored(tmp_path: Path) -> None:
    """fp16 with its loss scale and dropout, in one run and in two."""

    def run(start: Path | None = None) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(5 + dist.get_rank())
        keep = saver(str(tmp_path), save_top_k=-1, filename="{epoch}")
        strategy = Strategy(precision_plugin=ShardedPrecision("16-mixed"), cpu_offload=True)
        made = trainer(strategy, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
        made.fit(toy(body=Dropping, schedule=True), data(5), ckpt_path=start)
        scale = made.optimizers[0].scaler.scale
        return ended(made).weights, scale

    (one, scale), (other, again) = run(), run(tmp_path / "epoch=0.ckpt")
    assert scale == again and one["calls"] == 10
    assert worst(one, other) == 0.0 or not since(2, 5), "older versions draw once more when a run resumes"


class Described(Toy):
    """Has hyperparameters of many classes, one of which is no plain data."""

    def __init__(self, act: Any, folder: Path, options: Namespace, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.folder, self.options = folder, options
        self.save_hyperparameters()  # type: ignore[attr-defined]


def described() -> Any:
    return toy(body=Described, act=nn.ReLU(), folder=Path("a"), options=Namespace(sizes={3}, dtype=torch.bfloat16))


def save_described(path: str) -> int:
    made = trainer(Strategy())
    made.fit(described(), data())
    with pytest.warns(UserWarning, match="checkpoints are without hyper_parameters/act: nothing in them is pickled"):
        made.save_checkpoint(f"{path}/one.ckpt")
    with warnings.catch_warnings(record=True, action="always") as said:
        made.save_checkpoint(f"{path}/one.ckpt")
    close(made)
    return sum("are without" in str(each.message) for each in said)


def test_hyperparameters_that_are_no_data_are_not_saved(tmp_path: Path) -> None:
    assert run_ranks(RANKS, save_described, str(tmp_path)) == [0] * RANKS
    files = sorted((tmp_path / "one.ckpt").iterdir())
    assert [file.suffix for file in files] == [".json", *[".safetensors"] * RANKS]
    assert not any(mark in file.read_bytes() for file in files for mark in (b"PK\x03\x04", b"ReLU", b"\x80\x02}"))
    with pytest.warns(UserWarning, match="was saved without hyper_parameters/act: give these hyperparameters"):
        to_single_file(tmp_path / "one.ckpt", tmp_path / "one")
    load = type(described()).load_from_checkpoint
    if "weights_only" in inspect.signature(load).parameters:
        load = functools.partial(load, weights_only=False)
    elif not since(2, 4):  # it reads what torch accepts as data
        return
    raises(TypeError, "'act'", lambda: load(tmp_path / "one"))
    model = load(tmp_path / "one", act=nn.ReLU())
    assert model.folder == Path("a") and model.options == Namespace(sizes={3}, dtype=torch.bfloat16)


@on_ranks()
@pytest.mark.parametrize(
    ("kind", "precision", "ranks"),
    [
        ("fully_sharded", "32-true", 2),
        ("deepspeed_1", "bf16-mixed", 2),
        *full(("colossalai", "bf16-mixed", 2), ("deepspeed_3_offload", "bf16-mixed", 1)),
    ],
)
def test_save_weights_only(kind: str, precision: str, ranks: int, tmp_path: Path) -> None:
    """Save by a callback and by a call; with 16-bit parameters the saved weights are the masters, bit for bit."""
    keep = saver(str(tmp_path), save_weights_only=True, filename="kept")
    made = trainer(strategy(kind), callbacks=[keep], enable_checkpointing=True, precision=precision)
    made.fit(toy(), data())
    made.save_checkpoint(tmp_path / "called.ckpt", weights_only=True)
    expected = ended(made).weights
    used = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    assert used is torch.float32 or any(not torch.equal(v, v.to(used).float()) for v in expected.values())
    for path in (tmp_path / "kept.ckpt", tmp_path / "called.ckpt"):
        with open_checkpoint(path) as source:
            assert {name for name in source.tensors() if "/net." in name} == {f"model/{name}" for name in expected}
            for name, value in expected.items():
                assert torch.equal(source.read(f"model/{name}", 0, value.numel()).view(value.shape), value), name
        other = trainer(strategy(kind), precision=precision)
        other.validate(toy(seed=9), data(), ckpt_path=path, verbose=False)
        generator = torch.get_rng_state()
        other.strategy.load_checkpoint(path)
        assert torch.equal(torch.get_rng_state(), generator)  # evaluation does not change the random state
        rounded = {name: value.to(used).float() for name, value in expected.items()}
        assert worst(rounded, ended(other).weights) == 0.0  # an evaluation has no masters
    again = trainer(strategy(kind), max_epochs=2, precision=precision)
    with pytest.warns(UserWarning, match="holds weights only: optimizers and schedulers start from"):
        again.fit(toy(seed=9, schedule=True), data(), ckpt_path=path)
    assert again.global_step == 8
    close(again)


@on_ranks(RANKS)
def test_training_starts_from_a_hugging_face_directory(tmp_path: Path) -> None:
    save_file(dict(toy().state_dict()), tmp_path / "model.safetensors")
    made = trainer(Strategy())
    with pytest.warns(UserWarning, match="holds weights only: optimizers and counters start from"):
        made.fit(toy(seed=9), data(), ckpt_path=tmp_path)
    assert made.global_step == 4 and worst(ended(made).weights, fit(stock(), toy())) <= 1e-6


@on_ranks(RANKS)
@pytest.mark.full
def test_single_files_through_a_checkpoint_io(tmp_path: Path) -> None:
    """With a ``checkpoint_io`` the strategies write single files that stock Lightning and they themselves resume."""
    io = type("Io", (LIGHTNING.load("plugins.io.TorchCheckpointIO"),), {})()
    first = trainer(Strategy(checkpoint_io=io))
    first.fit(toy(schedule=True), data())
    first.save_checkpoint(tmp_path / "file.ckpt")
    close(first)
    assert (tmp_path / "file.ckpt").is_file()
    straight = fit(stock(), toy(schedule=True), max_epochs=2)
    for each in (stock(), Strategy(), Strategy(cpu_offload=True, flatten_parameters=False)):
        found = fit(each, toy(schedule=True), max_epochs=2, ckpt_path=tmp_path / "file.ckpt")
        assert worst(straight, found) <= 1e-6


@on_ranks(RANKS)
def test_asynchronous_saving(tmp_path: Path) -> None:
    io = LIGHTNING.load("plugins.io.AsyncCheckpointIO")()
    keep = saver(str(tmp_path), save_top_k=-1, filename="{epoch}")
    options = {"max_epochs": 2, "callbacks": [keep], "enable_checkpointing": True, "plugins": [io]}
    with mock.patch.object(Checkpointer, "save", autospec=True, side_effect=Checkpointer.save) as save:
        expected = fit(Strategy(), toy(), **options)
    assert [call.kwargs["use_async"] for call in save.call_args_list] == [True, True]
    other = trainer(Strategy())
    other.test(toy(), data(), ckpt_path=tmp_path / "epoch=1.ckpt", verbose=False)
    assert worst(expected, ended(other).weights) == 0.0


@on_ranks(RANKS)
@pytest.mark.full
def test_learning_rate_finder_restores_everything(tmp_path: Path) -> None:
    """It saves, trains, restores and removes its file."""
    find = LIGHTNING.load("callbacks.LearningRateFinder")
    options = {"loader": data(8), "default_root_dir": tmp_path, "enable_checkpointing": True}
    expected, found = (
        fit(make(), toy(), callbacks=[find(num_training_steps=5, update_attr=False)], **options)
        for make in (stock, Strategy)
    )
    assert list(tmp_path.glob(".lr_find*")) == [] and worst(found, expected) <= 1e-6
    # Before 2.5, Lightning continues after the batches of the search, under ddp too.
    assert worst(expected, fit(stock(), toy(), loader=data(8))) <= 1e-6 or not since(2, 5)


# -- a module that has changed since it was saved: state is matched by name, schedules by class


class _Changed(Toy):
    """A module with one more layer, and another class of schedule or optimizer on request."""

    other: str = ""

    def build(self) -> None:
        super().build()
        self.more = nn.Linear(OUT, OUT)

    def configure_optimizers(self) -> Any:
        if self.other == "optimizer":
            return torch.optim.RMSprop(self.parameters(), lr=0.01)
        made = super().configure_optimizers()
        if self.other == "schedule":
            made["lr_scheduler"]["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(made["optimizer"], 9)
        return made


class _Seen(_Changed):
    """Records the optimizer state and the schedule when the first step begins."""

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.seen:
            optimizer = self.trainer.strategy.optimizers[0]
            state = optimizer.state_dict()["state"]
            (config,) = self.trainer.lr_scheduler_configs
            self.seen = [sorted(state), config.scheduler.last_epoch, [group["lr"] for group in optimizer.param_groups]]


def _save(kind: str, path: str) -> list[Any]:
    warnings.simplefilter("ignore")
    made = trainer(strategy(kind))
    made.fit(toy(schedule=True), data(5))
    made.save_checkpoint(path)
    found = [made.lr_scheduler_configs[0].scheduler.last_epoch, made.strategy.optimizers[0].param_groups[0]["lr"]]
    close(made)
    return found


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", ["fully_sharded", pytest.param("colossalai", marks=pytest.mark.campaign)])
def test_state_is_matched_by_name_unless_loading_is_strict(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    epoch, rate = _save(kind, path)
    stays = "the state is of StepLR, the scheduler a CosineAnnealingLR; it stays as it is"
    for other, begins in (("", epoch), ("schedule", 0)):
        model = toy(body=_Seen, schedule=True)
        model.other, model.strict_loading = other, False
        with warnings.catch_warnings(record=True, action="always") as caught:
            made = trainer(strategy(kind), max_epochs=2)
            made.fit(model, data(5), ckpt_path=path)
        close(made)
        told = [str(each.message) for each in caught]
        assert any("start without state: more.weight, more.bias" in each for each in told) == (dist.get_rank() == 0)
        assert any(stays in each for each in told) == bool(other)
        assert model.seen[:2] == [list(range(6)), begins]  # the new layer, 6 and 7, has no state
        assert other or model.seen[2] == [pytest.approx(rate)]


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("other", "words"),
    [
        *full(("schedule", "the state is of StepLR, the scheduler a CosineAnnealingLR")),
        ("optimizer", "optimizer 0 is RMSprop, but the checkpoint has the state of"),
    ],
)
def test_state_of_another_class_is_an_error(other: str, words: str, tmp_path: Path) -> None:
    """The class is the only change, and nothing is loaded."""
    _save("fully_sharded", str(tmp_path / "one.ckpt"))

    class Same(_Changed):
        build = Toy.build

    model = toy(body=Same, schedule=True, seed=9)
    model.other = other
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after: dict[str, torch.Tensor] = {}

    class Kept(Callback):
        def on_exception(self, made: Any, *_: Any) -> None:
            after.update({name: value.clone() for name, value in made.strategy.session.module.state_dict().items()})

    made = trainer(strategy("fully_sharded"), max_epochs=2, callbacks=[Kept()])
    raises(ValueError, words, made.fit, model, data(5), ckpt_path=tmp_path / "one.ckpt")
    assert_close(after, before, 0.0, "nothing was loaded")


# -- what cannot be saved or loaded


class Unsaveable(Toy):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["entry"] = lambda: None


class Changing(Toy):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.bias"]


@on_ranks(RANKS)
@pytest.mark.full
def test_wrong_uses(tmp_path: Path) -> None:
    path = tmp_path / "inner"
    made = trainer(Strategy())
    made.fit(toy(body=Changing), data())
    with pytest.raises(TypeError, match="give the strategy a checkpoint_io"):
        made.save_checkpoint(path / "x.ckpt", storage_options={"a": 1})
    raises(ValueError, "a directory that all ranks mount", lambda: made.save_checkpoint("s3://bucket/x.ckpt"))
    with pytest.warns(UserWarning, match="on_save_checkpoint changed state_dict"):
        made.save_checkpoint(path / "x.ckpt")
    close(made)
    made = trainer(Strategy())
    made.fit(toy(body=Unsaveable), data())
    with pytest.raises(CheckpointError, match=r"rank 0 could not put together .*entry entry is a builtins.function"):
        made.save_checkpoint(path / "y.ckpt")
    assert not (path / "y.ckpt").exists()
    close(made)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        trainer(Strategy()).test(toy(), data(), ckpt_path=tmp_path, verbose=False)
    model = toy()
    model.net[4] = nn.Linear(16, 5)
    with pytest.raises(ValueError, match=r"net.4.weight: \(3, 16\) in the checkpoint, \(5, 16\) in the model"):
        trainer(Strategy()).test(model, data(), ckpt_path=path / "x.ckpt", verbose=False)


class Hyper(Toy):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.save_hyperparameters()  # type: ignore[attr-defined]


def directories_resumed(kind: str, path: str) -> dict[str, Tensor]:
    """Run ddp without interruption, or begin under a strategy and resume its directory under ddp."""
    arguments = {"accumulate_grad_batches": 2, "limit_train_batches": 4}
    made = trainer(strategy(kind), max_epochs=2 if kind == STOCK else 1, **arguments)
    made.fit(toy(body=Hyper, schedule=True, seed=8), data())
    if kind == STOCK:
        return weights(made)
    made.save_checkpoint(f"{path}/{kind}")
    close(made)
    return fit(stock(), toy(body=Hyper, schedule=True, seed=9), max_epochs=2, ckpt_path=f"{path}/{kind}", **arguments)


@on_ranks(RANKS)
def test_ddp_of_fabric_resumes_a_directory(tmp_path: Path) -> None:
    """Fabric's own data parallelism loads what the strategies saved."""
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


@pytest.mark.parametrize("name", rows(THREE, [], ["fully_sharded"]))
def test_ddp_resumes_a_directory(name: str, tmp_path: Path) -> None:
    """The run ends as uninterrupted ddp: weights, schedules, moments and counters; one process can load the module,
    too."""
    straight, found = (run_ranks(RANKS, directories_resumed, each, str(tmp_path))[0] for each in (STOCK, name))
    assert worst(straight, found) < 1e-6
    kind = type(toy(body=Hyper))
    model = kind.load_from_checkpoint(tmp_path / name, map_location="cpu")
    file = to_single_file(tmp_path / name, tmp_path / "one.ckpt", optimizers=True)
    assert model.seed == 8 and len(file["optimizer_states"]) == 1
    assert all(torch.equal(value, file["state_dict"][n]) for n, value in model.state_dict().items())
    again = kind.load_from_checkpoint(tmp_path / "one.ckpt", seed=3)
    assert again.seed == 3 and torch.equal(again.net[0].weight, model.net[0].weight)
    converted = convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "fp32.pt", tag=name)["state_dict"]
    assert converted.keys() == torch.load(tmp_path / "fp32.pt", weights_only=False)["state_dict"].keys()
    same = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / name, tmp_path / "own.pt")
    assert worst(converted, same["state_dict"]) == 0.0
    with pytest.raises(FileNotFoundError, match="with tag='none': no such directory"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "fp32.pt", tag="none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no checkpoint"):
        kind.load_from_checkpoint(tmp_path / "empty")


class Measured(Toy):
    """Has a metric from the constructor, whose state is saved in checkpoints, and one from ``configure_model``."""

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
    found = ended(made).metrics
    made = trainer(strategy(kind), max_epochs=1)
    model = toy(body=Measured)
    made.fit(model, data(), ckpt_path=f"{path}/{kind}")
    kept.append(float(model.kept.sum_value))
    close(made)
    return found, kept


@pytest.mark.parametrize("kind", kinds("colossalai"))
def test_metrics_are_reduced_over_ranks(kind: str, tmp_path: Path) -> None:
    """Both ranks log ddp's values; in a directory, each rank has its own saved metric state."""
    both = (run_ranks(RANKS, measured, each, str(tmp_path)) for each in (kind, STOCK))
    for rank, ((found, kept), (logged, of_stock)) in enumerate(zip(*both, strict=True)):
        assert found == pytest.approx(logged, abs=1e-5) and logged["mean_epoch"] != 0.0
        assert kept[:2] == of_stock[:2] == [4.0 * (rank + 1), 12.0]
        assert kept[2] == kept[0], "each rank's own"
