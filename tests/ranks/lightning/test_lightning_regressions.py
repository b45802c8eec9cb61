"""Faults of the old strategies, and of plugging one into Lightning, that no other test would notice."""

from __future__ import annotations

import pickle
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning_cases import STOCK, TWO, kinds, strategy

from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, close, data, fit, since, toy, trainer, weights, worst

RANKS = 2


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
