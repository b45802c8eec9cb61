"""Directories where Lightning expects a file, and torchmetrics under the strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning_cases import STOCK, THREE, kinds, rows, strategy
from torch import Tensor, nn

import shardwise.fabric
from shardwise.lightning import convert_zero_checkpoint_to_fp32_state_dict, to_single_file
from shardwise.strategies.namespace import FABRIC
from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, close, data, fabric, toy, trainer, weights

RANKS = 2


class Hyper(Toy):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.save_hyperparameters()  # type: ignore[attr-defined]


def resumed(kind: str, path: str) -> dict[str, Tensor]:
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


def of_fabric(path: str) -> None:
    """Fabric's own data parallelism reads what ours saved."""
    own = fabric(shardwise.fabric.DDPFullyShardedStrategy(), FABRIC)
    model = nn.Linear(3, 3)
    sharded, optimizer = own.setup(model, torch.optim.Adam(model.parameters()))
    own.backward(sharded(torch.ones(1, 3)).sum())
    optimizer.step()
    own.save(f"{path}/fabric", {"net": sharded, "adam": optimizer, "epoch": 5})
    whole, moments = sharded.state_dict(), optimizer.state_dict()["state"][0]["exp_avg"].clone()
    own.strategy.unshard()
    own = fabric("ddp", FABRIC)
    again = nn.Linear(3, 3)
    plain, adam = own.setup(again, torch.optim.Adam(again.parameters()))
    state = {"net": plain, "adam": adam, "epoch": 0}
    assert own.load(f"{path}/fabric", state) == {} and state["epoch"] == 5
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())
    assert torch.equal(adam.state_dict()["state"][0]["exp_avg"], moments)


def test_ddp_of_fabric_goes_on_from_a_directory(tmp_path: Path) -> None:
    run_ranks(RANKS, of_fabric, str(tmp_path))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run_ranks(RANKS, resumed, STOCK, str(tmp_path_factory.mktemp("straight")), timeout=180.0)[0]


@pytest.mark.parametrize("name", rows(THREE, [], ["fully_sharded"]))
def test_ddp_goes_on_from_a_directory(name: str, straight: dict[str, Tensor], tmp_path: Path) -> None:
    """As the straight run of ddp ends: weights, schedules, moments and counters; and one process loads the module."""
    ended = run_ranks(RANKS, resumed, name, str(tmp_path), timeout=180.0)[0]
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
