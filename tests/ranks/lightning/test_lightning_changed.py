"""A module that has changed since it was saved goes on under a Trainer: state by name, schedules by class."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning_cases import strategy
from torch import nn

from shardwise.testing import assert_close, run_ranks
from tests.support.lightning_setup import OUT, Toy, close, data, toy, trainer
from tests.support.sets import full

RANKS = 2


class _Changed(Toy):
    """One layer more, and another class of schedule or optimizer where that is asked for."""

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
    """What is there when the first step begins."""

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


def _go_on(kind: str, path: str, other: str, strict: bool) -> tuple[list[str], list[Any]]:
    model = toy(body=_Seen, schedule=True)
    model.other, model.strict_loading = other, strict
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(strategy(kind), max_epochs=2)
        made.fit(model, data(5), ckpt_path=path)
    close(made)
    words = ("loaded partially", "it stays as it is")
    return [str(each.message) for each in caught if any(word in str(each.message) for word in words)], model.seen


def _changed(kind: str, path: str) -> list[Any]:
    saved = _save(kind, path)
    new = _go_on(kind, path, "", False)
    schedule = _go_on(kind, path, "schedule", False)
    return [saved, new, schedule]


def _same_module(kind: str, path: str, other: str) -> str:
    """Nothing is new but a class."""
    _save(kind, path)

    class Same(_Changed):
        build = Toy.build

    model = toy(body=Same, schedule=True)
    model.other = other
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in before.values():
            value.add_(1.0)
    model.load_state_dict(before)
    after: dict[str, torch.Tensor] = {}

    class Kept(Callback):
        def on_exception(self, made: Any, *_: Any) -> None:
            after.update({name: value.clone() for name, value in made.strategy.session.module.state_dict().items()})

    with pytest.raises(ValueError) as error:
        trainer(strategy(kind), max_epochs=2, callbacks=[Kept()]).fit(model, data(5), ckpt_path=path)
    assert_close(after, before, 0.0, "nothing was loaded")
    return str(error.value)


@pytest.mark.parametrize("kind", ["fully_sharded", pytest.param("colossalai", marks=pytest.mark.campaign)])
def test_state_goes_by_name_unless_loading_is_strict(kind: str, tmp_path: Path) -> None:
    for rank, (saved, new, schedule) in enumerate(run_ranks(RANKS, _changed, kind, str(tmp_path / "one.ckpt"))):
        epoch, rate = saved
        told, seen = new
        assert sum("start without state: more.weight, more.bias" in each for each in told) == (rank == 0)
        assert seen == [list(range(6)), epoch, [pytest.approx(rate)]]  # the new layer, 6 and 7, has none
        told, seen = schedule
        assert any("the state is of StepLR, the scheduler a CosineAnnealingLR; it stays as it is" in e for e in told)
        assert seen[:2] == [list(range(6)), 0]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        *full(("schedule", "the state is of StepLR, the scheduler a CosineAnnealingLR")),
        ("optimizer", "optimizer 0 is RMSprop, but the checkpoint has the state of"),
    ],
)
def test_another_class_is_an_error(other: str, words: str, tmp_path: Path) -> None:
    for message in run_ranks(RANKS, _same_module, "fully_sharded", str(tmp_path / "one.ckpt"), other):
        assert words in message
