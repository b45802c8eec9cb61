"""Checkpoints of a Trainer: resuming bit for bit, ModelCheckpoint, and files of another strategy or library."""

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_cases import KINDS, MAIN, STOCK, ended, kinds, rows, strategy
from torch import Tensor, nn

from shardwise.strategies.lightning_packages import LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, close, data, toy, trainer, weights, worst
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full

RANKS = 2
EPOCHS = 3
Whole = dict[str, Tensor]


def everything(made: Any) -> Whole:
    """Return weights, optimizer state, learning rates, loss scale and counters, by name."""
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


def _saver(folder: str, **arguments: Any) -> Any:
    options = {"dirpath": folder, "filename": "{epoch}", "save_top_k": -1, **arguments}
    return LIGHTNING.load("callbacks.ModelCheckpoint")(**options)


def _fitted(kind: str, path: str | None, seed: int = 3, accumulate: int = 1, **arguments: Any) -> Whole:
    """Return the final state of a run, which resumes the checkpoint at ``path`` if there is one."""
    warnings.simplefilter("ignore")
    clip = {"gradient_clip_val": 0.05} if accumulate == 3 else {}
    made = trainer(strategy(kind), accumulate_grad_batches=accumulate, **clip, **arguments)
    made.fit(toy(schedule=True, seed=seed), data(5), ckpt_path=path)
    found = everything(made)
    close(made)
    return found


RESUMES = product(KINDS, (1, 2, 3), ("32-true", "bf16-mixed", "bf16-true"))
QUICK = [("fully_sharded", 3, "32-true")]
FULL = [("colossalai", 3, "32-true"), ("deepspeed_2", 3, "32-true"), ("deepspeed_3", 1, "bf16-mixed")]


@on_ranks(RANKS)
@pytest.mark.parametrize(("kind", "accumulate", "precision"), rows(RESUMES, QUICK, FULL))
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    kind: str, accumulate: int, precision: str, tmp_path: Path
) -> None:
    """With accumulation 3 of 5 batches, a strategy's own counter would be lost.

    Each rank is checked: FairScale and ColossalAI under Lightning saved rank 0's part of the optimizer state only.
    """
    options: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate": accumulate, "precision": precision}
    straight = _fitted(kind, None, enable_checkpointing=True, callbacks=[_saver(str(tmp_path))], **options)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)]
    assert int(straight["steps"]) == EPOCHS * -(-5 // accumulate)
    assert any("exp_avg" in name for name in straight)
    assert differences(straight, _fitted(kind, str(tmp_path / "epoch=0.ckpt"), 77, **options)) == []


# ---- ModelCheckpoint


class _Scored(Toy):
    """A model whose score is set by the test, epoch by epoch."""

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
    assert worst(trained, weights(made)) == 0.0, "the last"
    again, best = trainer(strategy(kind)), saver.best_model_path
    assert again.validate(toy(seed=9), data(2, seed=4), ckpt_path=best, verbose=False)[0]["val_loss"] == losses[0]
    for each in (again, made):
        close(each)
    return {"names": names, "best": Path(best).name, "score": float(saver.best_model_score), "losses": losses}


@pytest.mark.parametrize(
    ("kind", "save_last"), [("deepspeed_3", "link"), *campaign(("colossalai", True), ("fully_sharded", True))]
)
def test_model_checkpoint_saves_and_removes_as_under_ddp(kind: str, save_last: Any, tmp_path: Path) -> None:
    """It has directories instead of files: the two best, the last, and no rest of removed ones."""
    found, expected = (run_ranks(RANKS, _kept, each, str(tmp_path / each), save_last)[0] for each in (kind, STOCK))
    losses = pytest.approx(expected["losses"], rel=1e-5)
    names = ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert expected == {"names": names, "best": "epoch=1.ckpt", "score": 1.0, "losses": losses}
    assert found == {**expected, "losses": losses}


class _Remembers(Toy):
    """Records what the hooks receive, and saves a value of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = {name: list(value.shape) for name, value in checkpoint["state_dict"].items()}
        checkpoint["own"] = {"numbers": [1, 2.5], "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {name: list(value.shape) for name, value in checkpoint["state_dict"].items()}
        self.own = checkpoint["own"]


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai", of=MAIN))
def test_hooks_see_full_shapes_and_save_their_values(kind: str, tmp_path: Path) -> None:
    """Under DeepSpeed's stage 3 ``on_save_checkpoint`` received a sharded state."""
    warnings.simplefilter("ignore")
    model, other = toy(body=_Remembers), toy(body=_Remembers, seed=9)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    made = trainer(strategy(kind))
    made.fit(model, data(1))
    made.save_checkpoint(tmp_path / "one.ckpt")
    again = trainer(strategy(kind), max_epochs=2)
    again.fit(other, data(1), ckpt_path=tmp_path / "one.ckpt")
    assert again.global_step == 2 and model.saved == other.loaded == shapes
    assert other.own["numbers"] == [1, 2.5] and other.own["tensor"].tolist() == [0, 1, 2]
    for each in (made, again):
        close(each)


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("deepspeed_3", "fully_sharded", of=MAIN))
def test_save_after_test_and_after_evaluation_only(kind: str, tmp_path: Path) -> None:
    """DeepSpeed's engine had ended by then, and Lightning had moved the shards to the CPU."""
    warnings.simplefilter("ignore")
    model = toy()
    made, evaluator, third = (trainer(strategy(kind)) for _ in range(3))
    made.fit(model, data(2))
    straight = weights(made)
    made.test(model, data(1), verbose=False)
    made.save_checkpoint(tmp_path / "later.ckpt")
    evaluator.validate(toy(seed=8), data(1), ckpt_path=tmp_path / "later.ckpt", verbose=False)
    evaluator.save_checkpoint(tmp_path / "evaluated.ckpt")
    third.test(toy(seed=7), data(1), ckpt_path=tmp_path / "evaluated.ckpt", verbose=False)
    assert worst(straight, weights(evaluator)) == worst(straight, weights(third)) == 0.0
    for each in (made, evaluator, third):
        close(each)


# ---- between strategies, stages and other front-ends


def _save_one_epoch(kind: str, path: str) -> None:
    warnings.simplefilter("ignore")
    made = trainer(strategy(kind))
    made.fit(toy(schedule=True), data(5))
    made.save_checkpoint(path)
    close(made)


RING = list(zip(MAIN, (*MAIN[1:], MAIN[0]), strict=True))
EXCHANGES = [
    [RING[3], (STOCK, MAIN[3])],
    *full(RING[:3], RING[4:]),
    *campaign([(one, other) for one in (*KINDS, STOCK) for other in KINDS]),
]


@on_ranks(RANKS, timeout=600.0)
@pytest.mark.parametrize("pairs", EXCHANGES, ids=["one", "before it", "behind it", "each to each"])
def test_checkpoints_load_under_the_next_strategy(pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    """Each checkpoint, or file of stock ddp, is resumed by the second of its pair, and trained to the end."""
    straight = _fitted(STOCK, None, max_epochs=2)
    for saver in dict.fromkeys(saver for saver, _ in pairs):
        _save_one_epoch(saver, f"{tmp_path}/{saver}.ckpt")
    for saver, taker in pairs:
        found = _fitted(taker, f"{tmp_path}/{saver}.ckpt", 77, max_epochs=2)
        assert differences(found, straight, 1e-6) == [], (saver, taker)


# ---- checkpoints of another model


class _Larger(Toy):
    def build(self) -> None:
        super().build()
        self.more = nn.Linear(3, 3)


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai"))
def test_missing_names_are_an_error_unless_strict_loading_is_off(kind: str, tmp_path: Path) -> None:
    """DeepSpeed collected such errors and never raised them; ColossalAI's loader had no ``strict`` argument."""
    path = str(tmp_path / "one.ckpt")
    _save_one_epoch(kind, path)
    raises(Exception, r"more\.weight", trainer(strategy(kind)).test, toy(body=_Larger), data(1), ckpt_path=path)
    raises(Exception, r"more\.weight", trainer(strategy(kind)).fit, toy(body=_Larger), data(1), ckpt_path=path)
    model = toy(body=_Larger)
    model.strict_loading = False
    before = model.more.weight.detach().clone()
    made = trainer(strategy(kind))
    made.test(model, data(1), ckpt_path=path, verbose=False)
    assert torch.equal(ended(made).weights["more.weight"], before)
