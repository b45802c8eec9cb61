"""Faults of the old strategies, and of plugging one into Lightning, that no other test would notice."""

from __future__ import annotations

import pickle
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_cases import STOCK, TWO, Recipe, ended, kinds, off, rows, run, strategy
from torch import Tensor

from shardwise.testing import run_ranks
from tests.support.lightning_setup import WIDTH, Toy, close, data, fit, since, toy, trainer, weights, worst

RANKS = 2


class _Remakes(Toy):
    """As Lightning's own test of its FairScale strategy did."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append("remade")
        self.net = None
        self.seed = 55
        self.build()


def _remade(kind: str, folder: str) -> tuple[list[float], list[int]]:
    warnings.simplefilter("ignore")
    straight = trainer(strategy(kind), max_epochs=2)
    straight.fit(toy(), data(2))
    expected = ended(straight)
    differences, said = [], []
    for saver in (kind, STOCK):  # a directory, and a file
        path = f"{folder}/{saver}.ckpt"
        first = trainer(strategy(saver))
        first.fit(toy(), data(2))
        first.save_checkpoint(path)
        close(first)
        model = toy(body=_Remakes, seed=9)
        made = trainer(strategy(kind), max_epochs=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.fit(model, data(2), ckpt_path=path)
        said.append(sum("built modules again" in str(each.message) for each in caught))
        assert model.seen == ["remade"] and made.global_step == 4
        differences.append(off(ended(made), expected))
    return differences, said


EXACT = 1.0 + 2.0**-12  # no 16-bit number


def _evaluated_first(kind: str, optimizer: bool) -> tuple[list[int], list[str], float]:
    """How often it is said that weights are rounded, after each run; dtypes after all; and a weight."""
    warnings.simplefilter("ignore")
    model = toy(optimizer="sgd", lr=0.0)
    torch.nn.init.constant_(model.net[0].weight, EXACT)
    made = trainer(strategy(kind), precision="bf16-mixed")
    said = []
    for run_one in ([made.fit] if optimizer else []) + [made.validate, made.fit]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_one(model, data(1))
        said.append(sum("was sharded without an optimizer" in str(each.message) for each in caught))
    close(made)
    evaluator = trainer(strategy(kind), precision="bf16-mixed")
    evaluator.test(model, data(1), verbose=False)
    close(evaluator)
    return said, sorted({str(param.dtype) for param in model.parameters()}), float(model.net[0].weight[0, 0])


@pytest.mark.parametrize("kind", kinds("deepspeed_3", of=TWO))
def test_weights_that_an_evaluation_rounds_are_told_of(kind: str) -> None:
    for rank, (said, dtypes, weight) in enumerate(run_ranks(RANKS, _evaluated_first, kind, False)):
        assert said == [0, int(rank == 0)]
        assert dtypes == ["torch.float32"]
        assert weight == 1.0
    for said, dtypes, weight in run_ranks(RANKS, _evaluated_first, kind, True):
        assert said == [0, 0, 0]  # masters keep them
        assert dtypes == ["torch.float32"]
        del weight


@pytest.mark.parametrize("kind", rows(TWO, [], ["colossalai"]))
def test_layers_built_again_while_loading_do_not_lose_the_training(kind: str, tmp_path: Path) -> None:
    """They would have been outside of the sharding: never restored, never reduced, and trained by each rank alone."""
    for differences, said in run_ranks(RANKS, _remade, kind, str(tmp_path)):
        assert differences[0] == 0.0 and differences[1] <= 1e-6
        assert said == [1, 1]


class _ByTrainer(Toy):
    def make_optimizer(self) -> torch.optim.Optimizer:
        params = self.trainer.model.parameters()  # type: ignore[attr-defined]
        return torch.optim.AdamW(params, lr=self.lr, weight_decay=0.1, eps=1e-3)


def _by_trainer(kind: str) -> float:
    return worst(fit(strategy(kind), toy(body=_ByTrainer)), fit(strategy(STOCK), toy()))


@pytest.mark.parametrize("kind", kinds("fully_sharded", "colossalai"))
def test_optimizers_take_parameters_from_the_trainers_model_and_from_the_modules(kind: str) -> None:
    """FairScale's strategy took those of ``self.trainer.model`` alone, ColossalAI's those of the module alone."""
    assert max(run_ranks(RANKS, _by_trainer, kind)) <= 1e-6


def _hooked(kind: str) -> list[int]:
    warnings.simplefilter("ignore")
    model, calls, found = toy(), [0], []

    def count(*_: Any) -> None:
        calls[0] += 1

    model.net[0].register_forward_hook(count)
    made = trainer(strategy(kind))
    for run_one in (made.validate, made.fit, made.test):
        run_one(model, data(3))
        found.append(calls[0])
    made.fit_loop.max_epochs = 2
    made.fit(model, data(3))
    found.append(calls[0])
    close(made)
    model.net[0](torch.ones(1, WIDTH))
    return [*found, calls[0]]


@pytest.mark.parametrize("kind", kinds("deepspeed_3"))
def test_hooks_of_modules_survive_evaluation(kind: str) -> None:
    """Lightning removed all of them to make DeepSpeed's second engine, that of evaluation."""
    assert run_ranks(RANKS, _hooked, kind) == [[3, 6, 9, 12, 13]] * RANKS


class _Measured(Toy):
    """Has metrics, which keep tensors in dicts."""

    def configure_model(self) -> None:
        metrics = pytest.importorskip("torchmetrics")
        self.build()
        self.mean = metrics.MetricCollection([metrics.MeanMetric()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean.update(torch.ones(2) * batch_idx)
        return super().training_step(batch, batch_idx)


def _measured(kind: str) -> tuple[float, float]:
    model = toy(body=_Measured, where="configure_model")
    trained = fit(strategy(kind), model)
    value = float(model.mean.compute()["MeanMetric"])
    model.mean.reset()
    return value, worst(trained, fit(strategy(STOCK), toy()))


@pytest.mark.parametrize("kind", kinds("fully_sharded"))
def test_metrics_of_configure_model(kind: str) -> None:
    results = run_ranks(RANKS, _measured, kind)
    assert all(value > 0 and off <= 1e-6 for value, off in results), results


class _CountsClipping(Toy):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.seen.append("clipped")
        self.clip_gradients(optimizer, 0.05, "norm")  # type: ignore[attr-defined]


def _clipped(kind: str) -> int:
    model = toy(body=_CountsClipping)
    run(kind, Recipe(batches=5, epochs=2, accumulate=2), model)
    return len(model.seen)


def test_the_clipping_hook_runs_once_a_step() -> None:
    """Under DeepSpeed it ran for each batch of an accumulation."""
    assert run_ranks(RANKS, _clipped, "deepspeed_2") == [6] * RANKS


def _one_optimizer_each(kind: str) -> float:
    class Scheduled(Toy):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers, schedules = self.optimizers(), self.lr_schedulers()  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch))  # type: ignore[attr-defined]
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        def configure_optimizers(self) -> Any:
            assert self.net is not None
            pair = [torch.optim.SGD(self.net[i].parameters(), lr=0.1 * (i + 1)) for i in (0, 2)]
            return pair, [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in pair]

    found = []
    for each in (kind, STOCK):
        model = toy(body=Scheduled)
        model.net[4].requires_grad_(False)
        found.append(fit(strategy(each), model, max_epochs=2))
    return worst(*found)


@pytest.mark.parametrize("kind", kinds("deepspeed_3", of=TWO))
def test_several_optimizers_with_a_schedule_each(kind: str) -> None:
    """DeepSpeed took one optimizer and one schedule."""
    assert max(run_ranks(RANKS, _one_optimizer_each, kind)) <= 1e-6


def _not_a_directory(path: str) -> list[str]:
    warnings.simplefilter("ignore")
    offloaded = {"offload_optimizer": True, "offload_optimizer_device": "nvme"}
    model = toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = trainer(strategy("deepspeed_3", **offloaded, nvme_path=path))
    with pytest.raises(RuntimeError) as caught:
        made.fit(model, data(1))
    assert worst(before, dict(model.state_dict())) == 0.0, "the model is as it was"
    difference = worst(fit(strategy("deepspeed_3"), model), fit(strategy(STOCK), toy()))
    assert difference <= 1e-6
    return [str(caught.value)]


@pytest.mark.full
def test_a_disk_that_cannot_be_written_is_an_error_on_every_rank_and_the_model_stays(tmp_path: Path) -> None:
    """DeepSpeed took any path, and found out when it wrote."""
    file = tmp_path / "file"
    file.touch()
    for (said,) in run_ranks(RANKS, _not_a_directory, str(file)):
        assert str(file) in said and "choose a directory, not a file" in said


def _pickled(path: str) -> list[str]:
    """A file of stock Lightning with a class among its hyperparameters."""
    warnings.simplefilter("ignore")
    source = trainer(strategy(STOCK))
    source.fit(toy(), data(1))
    source.save_checkpoint(path)
    if dist.get_rank() == 0:
        whole = torch.load(path, weights_only=False)
        torch.save({**whole, "hyper_parameters": {"options": Namespace(sizes=1)}}, path)
    dist.barrier()
    made = trainer(strategy("deepspeed_3"))
    notes = []
    if since(2, 6) or not since(2, 4):  # those between read whatever a file has
        with pytest.raises(pickle.UnpicklingError, match="weights_only") as caught:
            made.test(toy(), data(1), ckpt_path=path, verbose=False)
        notes.append(" ".join(caught.value.__notes__))
    with torch.serialization.safe_globals([Namespace]):
        made.test(toy(seed=9), data(1), ckpt_path=path, verbose=False)
    assert worst(weights(made), weights(source)) == 0.0
    close(made)
    return notes


@pytest.mark.full
def test_a_file_with_classes_says_how_to_allow_them(tmp_path: Path) -> None:
    """``weights_only`` of ``fit`` and ``test`` never reaches a strategy that restores after its setup."""
    for notes in run_ranks(RANKS, _pickled, str(tmp_path / "one.ckpt")):
        assert all("allow the classes by torch.serialization.add_safe_globals" in note for note in notes)
        assert len(notes) == 1 or not since(2, 6)
