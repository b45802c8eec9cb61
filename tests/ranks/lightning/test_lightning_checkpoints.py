"""Checkpoints of a Trainer: resuming bit for bit, ModelCheckpoint, and files that another strategy or library wrote."""

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_cases import KINDS, MAIN, STOCK, kinds, rows, strategy
from torch import Tensor, nn

from shardwise.strategies.namespace import LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, close, data, toy, trainer, weights
from tests.support.on_ranks import raises
from tests.support.sets import campaign, full

RANKS = 2
EPOCHS = 3
Whole = dict[str, Tensor]


def callback(path: str, **arguments: Any) -> Any:
    return LIGHTNING.load(f"callbacks.{path}")(**arguments)


def everything(made: Any) -> Whole:
    """Weights, optimizer state, learning rates, loss scale and counters, by name."""
    found = dict(weights(made))
    for index, optimizer in enumerate(made.optimizers):
        state = made.strategy.optimizer_state(optimizer)
        for param, entries in state["state"].items():
            found |= {f"optimizer {index}/{param}/{k}": torch.as_tensor(v).clone() for k, v in entries.items()}
        found[f"rates {index}"] = torch.tensor([group["lr"] for group in state["param_groups"]])
    found["steps"] = torch.tensor(made.global_step)
    found["epoch"] = torch.tensor(made.current_epoch)
    return found


def differences(one: Whole, other: Whole, most: float = 0.0) -> list[str]:
    assert one.keys() == other.keys()
    return [n for n, v in one.items() if not bool(((v.double() - other[n].double()).abs() <= most).all())]


def _settings(accumulate: int = 1, epochs: int = EPOCHS, **arguments: Any) -> dict[str, Any]:
    clip = {"gradient_clip_val": 0.05} if accumulate == 3 else {}
    return {"max_epochs": epochs, "accumulate_grad_batches": accumulate, **clip, **arguments}


def _saver(folder: str, **arguments: Any) -> Any:
    return callback("ModelCheckpoint", **{"dirpath": folder, "filename": "{epoch}", "save_top_k": -1, **arguments})


def _straight(kind: str, folder: str, accumulate: int, precision: str) -> Whole:
    """All epochs, with a checkpoint after each."""
    warnings.simplefilter("ignore")
    made = trainer(
        strategy(kind),
        enable_checkpointing=True,
        callbacks=[_saver(folder)],
        precision=precision,
        **_settings(accumulate),
    )
    made.fit(toy(schedule=True), data(5))
    found = everything(made)
    close(made)
    return found


def _resumed(kind: str, path: str, accumulate: int = 1, precision: str = "32-true", epochs: int = EPOCHS) -> Whole:
    """The rest, in a model that starts from other weights."""
    warnings.simplefilter("ignore")
    made = trainer(strategy(kind), precision=precision, **_settings(accumulate, epochs))
    made.fit(toy(schedule=True, seed=77), data(5), ckpt_path=path)
    found = everything(made)
    close(made)
    return found


RESUMES = product(KINDS, (1, 2, 3), ("32-true", "bf16-mixed", "bf16-true"))
QUICK = [("fully_sharded", 3, "32-true")]
FULL = [("colossalai", 3, "32-true"), ("deepspeed_2", 3, "32-true"), ("deepspeed_3", 1, "bf16-mixed")]


@pytest.mark.parametrize(("kind", "accumulate", "precision"), rows(RESUMES, QUICK, FULL))
def test_a_resumed_run_equals_a_straight_one_bit_for_bit(
    kind: str, accumulate: int, precision: str, tmp_path: Path
) -> None:
    """Also at accumulation 3 of 5 batches: a counter of the strategy's own would be lost. And at every rank: FairScale
    and ColossalAI under Lightning saved rank 0's part of the optimizer state only."""
    straight = run_ranks(RANKS, _straight, kind, str(tmp_path), accumulate, precision)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)]
    resumed = run_ranks(RANKS, _resumed, kind, str(tmp_path / "epoch=0.ckpt"), accumulate, precision)
    for one, other in zip(straight, resumed, strict=True):
        assert int(one["steps"]) == EPOCHS * -(-5 // accumulate)
        assert any("exp_avg" in name for name in one)
        assert differences(one, other) == []


# ---- ModelCheckpoint


class _Scored(Toy):
    """Its score is what the test says, epoch by epoch."""

    SCORES = (3.0, 1.0, 2.0, 1.5)

    def on_train_epoch_end(self) -> None:
        self.log("score", self.SCORES[self.current_epoch])  # type: ignore[attr-defined]


def _kept(kind: str, folder: str, save_last: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    saver = _saver(folder, monitor="score", save_top_k=2, save_last=save_last)
    made = trainer(strategy(kind), max_epochs=4, enable_checkpointing=True, callbacks=[saver])
    model = toy(body=_Scored)
    made.fit(model, data(2))
    trained = weights(made)
    losses = [
        made.test(model, data(2, seed=4), ckpt_path=which, verbose=False)[0]["test_loss"] for which in ("best", "last")
    ]
    names = sorted(path.name for path in Path(folder).iterdir())
    last = weights(made)
    again = trainer(strategy(kind), max_epochs=1)
    losses.append(
        again.validate(toy(seed=9), data(2, seed=4), ckpt_path=saver.best_model_path, verbose=False)[0]["val_loss"]
    )
    found = {
        "names": names,
        "best": Path(saver.best_model_path).name,
        "score": float(saver.best_model_score),
        "losses": losses,
        "last": max(float((last[name] - value).abs().max()) for name, value in trained.items()),
    }
    close(again)
    close(made)
    return found


@pytest.fixture(scope="module")
def kept_by_stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[dict[str, Any]]]:
    @cache
    def result(save_last: Any) -> list[dict[str, Any]]:
        return run_ranks(RANKS, _kept, STOCK, str(tmp_path_factory.mktemp("stock")), save_last)

    return result


@pytest.mark.parametrize(
    ("kind", "save_last"), [("deepspeed_3", "link"), *campaign(("colossalai", True), ("fully_sharded", True))]
)
def test_model_checkpoint_keeps_and_removes_as_under_ddp(
    kind: str, save_last: Any, kept_by_stock: Callable[[Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Directories instead of files: two best, the last, and nothing of those that were dropped."""
    for found, expected in zip(
        run_ranks(RANKS, _kept, kind, str(tmp_path), save_last), kept_by_stock(save_last), strict=True
    ):
        assert found["names"] == expected["names"] == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]
        assert (found["best"], found["score"]) == (expected["best"], expected["score"]) == ("epoch=1.ckpt", 1.0)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["losses"][0] == found["losses"][2] and found["last"] == 0.0


class _Remembers(Toy):
    """Looks at what hooks are given, and keeps something of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = {name: list(value.shape) for name, value in checkpoint["state_dict"].items()}
        checkpoint["own"] = {"numbers": [1, 2.5], "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {name: list(value.shape) for name, value in checkpoint["state_dict"].items()}
        self.own = checkpoint["own"]


def _hooks(kind: str, folder: str) -> tuple[bool, bool, Any]:
    warnings.simplefilter("ignore")
    model = toy(body=_Remembers)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    made = trainer(strategy(kind))
    made.fit(model, data(1))
    made.save_checkpoint(f"{folder}/one.ckpt")
    other = toy(body=_Remembers, seed=9)
    again = trainer(strategy(kind), max_epochs=2)
    again.fit(other, data(1), ckpt_path=f"{folder}/one.ckpt")
    assert again.global_step == 2
    own = (other.own["numbers"], other.own["tensor"].tolist())
    found = model.saved == shapes, other.loaded == shapes, own
    close(made)
    close(again)
    return found


@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai", of=MAIN))
def test_hooks_see_whole_shapes_and_keep_what_they_add(kind: str, tmp_path: Path) -> None:
    """Under DeepSpeed's stage 3 ``on_save_checkpoint`` saw a sharded state."""
    expected = (True, True, ([1, 2.5], [0, 1, 2]))
    assert run_ranks(RANKS, _hooks, kind, str(tmp_path)) == [expected] * RANKS


def _save_after_test(kind: str, folder: str) -> tuple[list[str], bool]:
    warnings.simplefilter("ignore")
    model = toy()
    made = trainer(strategy(kind), max_epochs=1)
    made.fit(model, data(2))
    straight = everything(made)
    made.test(model, data(1), verbose=False)
    made.save_checkpoint(f"{folder}/later.ckpt")
    other = toy(seed=8)
    evaluator = trainer(strategy(kind))
    evaluator.validate(other, data(1), ckpt_path=f"{folder}/later.ckpt", verbose=False)
    same = differences({n: v for n, v in straight.items() if n.startswith("net")}, weights(evaluator))
    evaluator.save_checkpoint(f"{folder}/evaluated.ckpt")
    third = trainer(strategy(kind))
    third.test(toy(seed=7), data(1), ckpt_path=f"{folder}/evaluated.ckpt", verbose=False)
    equal = differences(weights(evaluator), weights(third)) == []
    for each in (made, evaluator, third):
        close(each)
    return same, equal


@pytest.mark.parametrize("kind", kinds("deepspeed_3", "fully_sharded", of=MAIN))
def test_save_after_test_and_after_evaluation_alone(kind: str, tmp_path: Path) -> None:
    """DeepSpeed's engine was gone by then, and Lightning had moved the shards to the CPU."""
    assert run_ranks(RANKS, _save_after_test, kind, str(tmp_path)) == [([], True)] * RANKS


# ---- between strategies, stages and other front-ends


def _save_one_epoch(kind: str, path: str) -> None:
    warnings.simplefilter("ignore")
    made = trainer(strategy(kind), **_settings(epochs=1))
    made.fit(toy(schedule=True), data(5))
    made.save_checkpoint(path)
    close(made)


def _exchange(pairs: list[tuple[str, str]], folder: str) -> dict[tuple[str, str], Whole]:
    """Each checkpoint is taken up by the second of its pair, and trained to the end."""
    for saver in dict.fromkeys(saver for saver, _ in pairs):
        _save_one_epoch(saver, f"{folder}/{saver}.ckpt")
    return {(saver, taker): _resumed(taker, f"{folder}/{saver}.ckpt", epochs=2) for saver, taker in pairs}


RING = list(zip(MAIN, (*MAIN[1:], MAIN[0]), strict=True))
ALL_PAIRS = [(one, other) for one in (*KINDS, STOCK) for other in KINDS]


@pytest.fixture(scope="module")
def straight_stock() -> list[Whole]:
    return run_ranks(RANKS, _straight_stock)


def _straight_stock() -> Whole:
    warnings.simplefilter("ignore")
    made = trainer(strategy(STOCK), **_settings(epochs=2))
    made.fit(toy(schedule=True), data(5))
    return everything(made)


def _check_exchange(pairs: list[tuple[str, str]], folder: Path, expected: list[Whole]) -> None:
    for found, straight in zip(run_ranks(RANKS, _exchange, pairs, str(folder), timeout=600), expected, strict=True):
        for pair, ended in found.items():
            assert differences(ended, straight, 1e-6) == [], pair


PARTS = [slice(3, 4), *full(slice(0, 3), slice(4, 5))]
"""Of five exchanges one is quick. What is left of those from a file is in ``test_checkpoints_go_from_each_to_each``."""
IDS = ["one", "before it", "behind it"]


@pytest.mark.parametrize("chosen", PARTS, ids=IDS)
def test_checkpoints_go_from_each_strategy_to_the_next(
    chosen: slice, straight_stock: list[Whole], tmp_path: Path
) -> None:
    _check_exchange(RING[chosen], tmp_path, straight_stock)


@pytest.mark.parametrize("chosen", PARTS[:1], ids=IDS[:1])
def test_a_file_of_stock_ddp_is_resumed_by_each(chosen: slice, straight_stock: list[Whole], tmp_path: Path) -> None:
    """Optimizer state included, in shards."""
    _check_exchange([(STOCK, kind) for kind in MAIN][chosen], tmp_path, straight_stock)


@pytest.mark.campaign
def test_checkpoints_go_from_each_to_each(straight_stock: list[Whole], tmp_path: Path) -> None:
    _check_exchange(ALL_PAIRS, tmp_path, straight_stock)


# ---- what does not fit


class _Larger(Toy):
    def build(self) -> None:
        super().build()
        self.more = nn.Linear(3, 3)


def _misfit(kind: str, path: str, strict: bool) -> list[float]:
    warnings.simplefilter("ignore")
    _save_one_epoch(kind, path)
    model = toy(body=_Larger)
    model.strict_loading = strict
    made = trainer(strategy(kind))
    before = model.more.weight.detach().clone()
    made.test(model, data(1), ckpt_path=path, verbose=False)
    after = weights(made)
    close(made)
    return [float((after["more.weight"] - before).abs().max())]


def _strict(kind: str, path: str) -> None:
    raises(Exception, r"more\.weight", lambda: _misfit(kind, path, True))
    raises(Exception, r"more\.weight", lambda: trainer(strategy(kind)).fit(toy(body=_Larger), data(1), ckpt_path=path))


@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai"))
def test_missing_names_are_an_error_unless_loading_is_not_strict(kind: str, tmp_path: Path) -> None:
    """DeepSpeed collected such errors and never raised them; ColossalAI's loader took no ``strict`` at all."""
    run_ranks(RANKS, _strict, kind, str(tmp_path / "one.ckpt"))
    assert run_ranks(RANKS, _misfit, kind, str(tmp_path / "two.ckpt"), False) == [[0.0]] * RANKS
