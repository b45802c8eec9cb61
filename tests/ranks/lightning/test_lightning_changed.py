"""A module that has changed since it was saved goes on under a Trainer: state by name, schedules by class.

Weights alone under 16 bits with masters: every strategy, and Fabric's, saves the masters and loads them.
"""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning_cases import rows, strategy
from torch import Tensor, nn

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.strategies.namespace import FABRIC, LIGHTNING, Namespace
from shardwise.testing import assert_close, run_ranks
from tests.support.lightning_setup import OUT, Toy, close, data, fabric, toy, trainer, weights
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
    with warnings.catch_warnings(record=True, action="always") as caught:
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


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "colossalai": ("ColossalAIStrategy", {"chunk_size": 100}),
    "deepspeed": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed, host": ("DeepSpeedStrategy", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "deepspeed, trained": ("DeepSpeedStrategy", {"stage": 1, "exclude_frozen_parameters": True}),
    "fully_sharded": ("DDPFullyShardedStrategy", {}),
}
HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
CASES = [(kind, "bf16-mixed", 2) for kind in KINDS]
CASES += [("fully_sharded", "bf16-mixed", 1), ("colossalai", "16-mixed", 2), ("deepspeed, trained", "16-mixed", 1)]
State = dict[str, Tensor]


def strategy_of(kind: str, precision: str, ns: Namespace) -> Any:
    package = importlib.import_module(ns.home)
    name, arguments = KINDS[kind]
    given = "precision" if ns is FABRIC else "precision_plugin"
    with warnings.catch_warnings(action="ignore"):
        return getattr(package, name)(**arguments, **{given: package.ShardedPrecision(precision)})


def under_trainer(kind: str, precision: str, directory: str) -> State:
    saver = LIGHTNING.load("callbacks.ModelCheckpoint")(dirpath=directory, filename="kept", save_weights_only=True)
    made = trainer(strategy_of(kind, precision, LIGHTNING), callbacks=[saver], enable_checkpointing=True)
    made.fit(toy(), data())
    made.save_checkpoint(f"{directory}/called.ckpt", weights_only=True)
    found = weights(made)
    for name in ("kept", "called"):
        made.test(toy(seed=9), data(), ckpt_path=f"{directory}/{name}.ckpt", verbose=False)
        restored = weights(made)  # for a test there are no masters
        used = {each: value.to(HALF[precision]).float() for each, value in found.items()}
        assert all(torch.equal(restored[each], used[each]) for each in found), (kind, name)
    close(made)
    return found


def under_fabric(kind: str, precision: str, directory: str) -> State:
    own, model = fabric(strategy_of(kind, precision, FABRIC), FABRIC), toy().net
    assert isinstance(model, nn.Module)
    sharded, optimizer = own.setup(model, torch.optim.Adam(model.parameters(), lr=0.05))
    for inputs, targets in data():
        own.backward((sharded(inputs).float() - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    own.save(f"{directory}/called.ckpt", {"model": sharded})
    found = {name: value.clone() for name, value in sharded.state_dict().items()}
    own.load(f"{directory}/called.ckpt", {"model": sharded})
    assert all(torch.equal(value, found[name]) for name, value in sharded.state_dict().items()), kind
    own.strategy.unshard()
    return found


def check(directory: Path, masters: State) -> None:
    """What every file has is the masters, bit for bit."""
    fine = [name for name, value in masters.items() if not torch.equal(value, value.bfloat16().float())]
    assert fine and all(value.dtype == torch.float32 for value in masters.values()), "there are masters"
    for path in directory.glob("*.ckpt"):
        with open_checkpoint(path) as source:
            names = {name for name in source.tensors() if name.startswith("model/")}
            assert names == {f"model/{name}" for name in masters}
            for name, value in masters.items():
                read = source.read(f"model/{name}", 0, value.numel())
                assert torch.equal(read.view(value.shape), value), (path, name)


ALL = [(program, *case) for program in (under_trainer, under_fabric) for case in CASES]
QUICK = [(under_trainer, "deepspeed, trained", "bf16-mixed", 2), (under_fabric, "fully_sharded", "bf16-mixed", 1)]

# Each strategy under the Trainer and under Fabric.
PAIRS = [(under_trainer, kind, "bf16-mixed", 2) for kind in ("deepspeed", "deepspeed, host", "fully_sharded")]
PAIRS += [(under_fabric, kind, "bf16-mixed", 2) for kind in ("deepspeed", "deepspeed, host")]
PAIRS += [(under_trainer, "colossalai", "16-mixed", 2)]
PAIRS += [(under_fabric, "colossalai", "16-mixed", 2), (under_fabric, "deepspeed, trained", "16-mixed", 1)]


@pytest.mark.parametrize(("program", "kind", "precision", "ranks"), rows(ALL, QUICK, PAIRS))
def test_weights_alone_are_the_masters(program: Any, kind: str, precision: str, ranks: int, tmp_path: Path) -> None:
    masters = run_ranks(ranks, program, kind, precision, str(tmp_path), timeout=120.0)[0]
    assert len(list(tmp_path.glob("*.ckpt"))) == (2 if program is under_trainer else 1)
    check(tmp_path, masters)
