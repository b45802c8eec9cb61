"""Everything that a Trainer does, with each strategy and with Lightning's own ``ddp``."""

import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_cases import KINDS, STOCK, TWO, Ended, Recipe, check_same, ended, kinds, rows, run, strategy
from torch import Tensor, nn

from shardwise.strategies.namespace import LIGHTNING
from shardwise.testing import run_ranks
from tests.support.lightning_setup import HIDDEN, OUT, Silent, Toy, close, data, toy, trainer, weights

RANKS = 2


def callback(path: str, **arguments: Any) -> Any:
    return LIGHTNING.load(f"callbacks.{path}")(**arguments)


Scenario = Callable[[str], Ended]


def accumulation_changes(kind: str) -> Ended:
    """1, then 3, then 2 batches a step, 5 batches an epoch."""
    scheduler = callback("GradientAccumulationScheduler", scheduling={0: 1, 1: 3, 2: 2})
    return run(kind, Recipe(epochs=3), callbacks=[scheduler])


def saving_within_an_accumulation(kind: str) -> Ended:
    """After every second batch, when three make a step: the gradients so far stay."""
    with tempfile.TemporaryDirectory() as folder:
        saver = callback("ModelCheckpoint", dirpath=folder, save_top_k=-1, filename="{step}", monitor="val_loss")
        recipe = Recipe(accumulate=3, clip=0.05)
        found = run(kind, recipe, callbacks=[saver], enable_checkpointing=True, val_check_interval=2)
        dist.barrier()
    assert len(saver.best_k_models) >= 2
    return found


def fit_twice(kind: str) -> Ended:
    """The same Trainer goes on; then another begins with the trained model."""
    model = toy()
    made = trainer(strategy(kind), max_epochs=1)
    made.fit(model, data(), data(2, seed=1))
    made.fit_loop.max_epochs = 2
    made.fit(model, data(), data(2, seed=1))
    assert made.global_step == 8
    if kind != STOCK:
        close(made)
    return run(kind, Recipe(epochs=1), model)


class _Freezes(LIGHTNING.load("callbacks.BaseFinetuning")):  # type: ignore[misc]
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pass


class _Unfreezes(_Freezes):
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def freezing(kind: str) -> Ended:
    """Resumed once: the callback sets the optimizer's groups again."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    saver = callback("ModelCheckpoint", dirpath=folder[0], filename="one")
    run(kind, Recipe(epochs=1), callbacks=[saver, _Freezes()], enable_checkpointing=True)
    dist.barrier()
    made = trainer(strategy(kind), max_epochs=2, callbacks=[_Freezes()])
    model = toy()
    first = model.net[0].weight.detach().clone()
    made.fit(model, data(), data(2, seed=1), ckpt_path=f"{folder[0]}/one.ckpt")
    found = ended(made)
    assert torch.equal(found.weights["net.0.weight"], first)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return found


class _Halved(Toy):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward(*args, **kwargs)  # type: ignore[no-untyped-call]


def own_backward(kind: str) -> Ended:
    """ColossalAI and DeepSpeed ignored the hook, with a warning."""
    return run(kind, Recipe(), toy(body=_Halved, optimizer="sgd"))


class _ClipsItself(Toy):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        limit = 0.1 if self.global_step % 2 else 0.02  # type: ignore[attr-defined]
        self.clip_gradients(optimizer, limit, "norm")  # type: ignore[attr-defined]


def own_clipping(kind: str) -> Ended:
    return run(kind, Recipe(accumulate=2), toy(body=_ClipsItself, optimizer="sgd"))


class _WarmsUp(Toy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 4)  # type: ignore[attr-defined]


def own_optimizer_step(kind: str) -> Ended:
    return run(kind, Recipe(), toy(body=_WarmsUp))


class _Adversaries(Toy):
    """Two networks with an optimizer each; the second is stepped every other batch, with gradients of both."""

    automatic_optimization = False

    def build(self) -> None:
        super().build()
        self.critic = nn.Sequential(nn.Linear(OUT, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        made, critic = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(made)  # type: ignore[attr-defined]
        output = self(batch[0])  # type: ignore[operator]
        loss = nn.functional.mse_loss(output, batch[1]) - 0.1 * self.critic(output).mean()
        self.manual_backward(loss)  # type: ignore[attr-defined]
        self.clip_gradients(made, 0.05, "norm")  # type: ignore[attr-defined]
        made.step()
        made.zero_grad()
        self.untoggle_optimizer(made)  # type: ignore[attr-defined]
        self.toggle_optimizer(critic)  # type: ignore[attr-defined]
        score = self.critic(self(batch[0]).detach()) - self.critic(batch[1])  # type: ignore[operator]
        self.manual_backward(score.square().mean())  # type: ignore[attr-defined]
        if batch_idx % 2:
            critic.step()
            critic.zero_grad()
        self.untoggle_optimizer(critic)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5),
            torch.optim.AdamW(self.critic.parameters(), lr=0.02, eps=1e-3),
        ]


def two_optimizers_by_hand(kind: str) -> Ended:
    """ColossalAI and DeepSpeed allowed one optimizer."""
    changes = {"find_unused_parameters": True} if kind == STOCK else {}
    made = trainer(strategy(kind, **changes), max_epochs=2)
    made.fit(toy(body=_Adversaries), data(4), data(2, seed=1))
    return ended(made)


def compiled(kind: str) -> Ended:
    """The whole LightningModule; for ZeRO-3 and FSDP this was refused or wrong. The oracle runs what is compiled."""
    recipe, model = Recipe(batches=3, epochs=1), toy(body=Silent)
    if kind == STOCK:
        return run(kind, recipe, model)
    try:
        return run(kind, recipe, torch.compile(model, backend="eager"))
    finally:
        torch._dynamo.reset()


def evaluated_first(kind: str) -> Ended:
    """Old ColossalAI: "You should run a completed iteration as your warmup iter"."""
    model = toy(schedule=True)
    made = trainer(strategy(kind), max_epochs=2)
    loaders = [data(2, seed=1), data(2, seed=2)]
    before = made.validate(model, loaders[0], verbose=False)[0]["val_loss"]
    tested = made.test(model, loaders[1], verbose=False)[0]["test_loss"]
    guesses = made.predict(model, loaders[1])
    made.fit(model, data(), loaders[0])
    trained = weights(made)
    steps = made.global_step
    after = made.validate(model, loaders[0], verbose=False)[0]["val_loss"]
    retested = made.test(model, loaders[1], verbose=False)[0]["test_loss"]
    metrics = {"before": before, "tested": tested, "after": after, "retested": retested}
    for name, guess in (("guess", guesses), ("later", made.predict(model, loaders[1]))):
        metrics[f"{name} 0"], metrics[f"{name} 1"] = (float(each.float().square().mean()) for each in guess)
    close(made)
    assert after < before and metrics["guess 0"] != metrics["later 0"]
    return Ended(trained, steps, float("nan"), metrics)


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        accumulation_changes,
        saving_within_an_accumulation,
        fit_twice,
        freezing,
        own_backward,
        own_clipping,
        own_optimizer_step,
        two_optimizers_by_hand,
        compiled,
        evaluated_first,
    )
}


def _play(kind: str, name: str) -> Ended:
    warnings.simplefilter("ignore")
    return SCENARIOS[name](kind)


@pytest.fixture(scope="module")
def oracle() -> Callable[[str], list[Ended]]:
    """What the stock strategy gives, each scenario once."""

    @cache
    def result(name: str) -> list[Ended]:
        return run_ranks(RANKS, _play, STOCK, name)

    return result


# Each scenario at least once. Twice and more where an engine plan has a way of its own (gradients between batches, that
# deepspeed_1 alone keeps whole), and where each of two old strategies was wrong.
DEFAULT = {
    "colossalai": {
        "accumulation_changes",
        "own_backward",
        "own_optimizer_step",
        "two_optimizers_by_hand",
        "evaluated_first",
    },
    "deepspeed_1": {"saving_within_an_accumulation", "two_optimizers_by_hand"},
    "deepspeed_3": {
        "accumulation_changes",
        "fit_twice",
        "freezing",
        "own_backward",
        "own_clipping",
        "two_optimizers_by_hand",
        "compiled",
    },
}
assert set().union(*DEFAULT.values()) == set(SCENARIOS)
QUICK = {
    "colossalai": ["own_optimizer_step", "evaluated_first"],
    "deepspeed_1": ["saving_within_an_accumulation"],
    "deepspeed_3": ["accumulation_changes", "own_backward", "two_optimizers_by_hand"],
}


def _pairs(names_by_kind: Mapping[str, Collection[str]]) -> list[tuple[str, str]]:
    return [(kind, name) for kind, names in names_by_kind.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), rows(product(KINDS, SCENARIOS), _pairs(QUICK), _pairs(DEFAULT)))
def test_as_stock_ddp(kind: str, name: str, oracle: Callable[[str], list[Ended]]) -> None:
    check_same(run_ranks(RANKS, _play, kind, name), oracle(name))


# ---- hooks that build the model


class _InHook(Toy):
    def configure_model(self) -> None:
        self.seen.append("built" if self.net is None else "kept")
        self.build()


class _InOldHook(_InHook):
    def configure_sharded_model(self) -> None:
        super().configure_model()

    configure_model = LIGHTNING.load("LightningModule").configure_model  # as if it were not overridden


class _Rebuilds(Toy):
    def configure_model(self) -> None:
        self.net = None
        self.build()


HOOKS = {"configure_model": _InHook, "configure_sharded_model": _InOldHook}


def _built_in(kind: str, hook: str) -> Ended:
    warnings.simplefilter("ignore")
    model = toy(body=HOOKS[hook], where=hook)
    made = trainer(strategy(kind))
    assert model.net is None
    made.validate(model, data(1, seed=1), verbose=False)
    made.fit(model, data())
    trained = weights(made)
    loss = made.test(model, data(1, seed=1), verbose=False)[0]["test_loss"]
    assert model.seen == ["built", "kept", "kept"]
    assert all(torch.equal(value, trained[name]) for name, value in weights(made).items())
    close(made)
    return Ended(trained, made.global_step, float("nan"), {"loss": loss})


@pytest.mark.parametrize(
    ("kind", "hook"),
    rows(product(TWO, HOOKS), [("colossalai", "configure_model")], [("deepspeed_3", "configure_sharded_model")]),
)
def test_models_built_in_a_hook(kind: str, hook: str) -> None:
    """The hook runs at every entry point; the trained model is the one that was built first."""
    check_same(run_ranks(RANKS, _built_in, kind, hook), run_ranks(RANKS, _built_in, STOCK, hook))


def _rebuilt(kind: str) -> tuple[float, list[str]]:
    model = toy(body=_Rebuilds)
    made = trainer(strategy(kind))
    made.fit(model, data(2))
    trained = weights(made)
    with warnings.catch_warnings(record=True, action="always") as caught:
        made.test(model, data(1, seed=1), verbose=False)
    after = weights(made)
    close(made)
    kept = max(float((after[name] - value).abs().max()) for name, value in trained.items())
    return kept, [str(each.message) for each in caught]


@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai", of=TWO))
def test_a_hook_that_builds_again_does_not_lose_the_training(kind: str) -> None:
    for difference, said in run_ranks(RANKS, _rebuilt, kind):
        assert difference == 0.0
        assert any("built modules again" in message for message in said)


# ---- decisions that ranks must share


def _decisions(kind: str) -> list[bool]:
    made = trainer(strategy(kind))
    made.fit(toy(), data(1))
    mine = dist.get_rank() == 1
    found = [made.strategy.reduce_boolean_decision(mine, all=each) for each in (True, False)]
    found += [made.strategy.reduce_boolean_decision(True, all=each) for each in (True, False)]
    close(made)
    return found


@pytest.mark.parametrize("kind", kinds("colossalai", "deepspeed_3", of=TWO))
def test_decisions_reach_every_rank(kind: str) -> None:
    """``reduce`` of ColossalAI gave its result to rank 0 only, so others stopped and saved at other times."""
    assert run_ranks(RANKS, _decisions, kind) == [[False, True, True, True]] * RANKS


class _OneRankStops(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank = dist.get_rank()
        self.log("mine", 1.0 - self.current_epoch * (rank == 0), sync_dist=False)  # type: ignore[attr-defined]


def _one_stops(kind: str) -> int:
    warnings.simplefilter("ignore")
    stopping = callback("EarlyStopping", monitor="mine", patience=1)
    made = trainer(strategy(kind), max_epochs=9, callbacks=[stopping])
    made.fit(toy(body=_OneRankStops), data(1), data(1))
    close(made)
    return int(made.current_epoch)


@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai", of=TWO))
def test_early_stopping_of_one_rank_stops_all(kind: str) -> None:
    """Rank 1's metric stands still, rank 0's falls."""
    assert run_ranks(RANKS, _one_stops, kind) == [2, 2]


# ---- refusals


AVERAGING: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "WeightAveraging": {},
    "EMAWeightAveraging": {},
}


def _averages(kind: str) -> dict[str, str]:
    said = {}
    for path, arguments in AVERAGING.items():
        if LIGHTNING.find(f"callbacks.{path}") is None:  # not every version has each
            continue
        made = trainer(strategy(kind), callbacks=[callback(path, **arguments)])
        with pytest.raises(NotImplementedError) as caught:
            made.fit(toy(), data(1))
        said[path] = str(caught.value)
    return said


@pytest.mark.parametrize("kind", kinds("colossalai", "deepspeed_3", of=TWO))
def test_weight_averaging_is_right_or_refused(kind: str) -> None:
    """Lightning refuses SWA for DeepSpeed by class, never the other two: they would have averaged shards."""
    for said in run_ranks(RANKS, _averages, kind):
        assert "StochasticWeightAveraging" in said
        for path, text in said.items():
            assert re.match(rf"{path} with .*Strategy: it averages and exchanges unsharded parameters", text)


def _unfreezing(kind: str) -> list[str]:
    said = []
    for each in (_Unfreezes(), callback("BackboneFinetuning")):
        with pytest.raises(NotImplementedError) as caught:
            made = trainer(strategy(kind), callbacks=[each])
            made.fit(_with_backbone(), data(1))
        said.append(str(caught.value))
    return said


def _with_backbone() -> Any:
    model = toy()
    model.backbone = nn.Linear(1, 1)
    return model


def test_callbacks_that_unfreeze_are_refused() -> None:
    for said in run_ranks(1, _unfreezing, "colossalai"):
        assert ["_Unfreezes" in said[0], "BackboneFinetuning" in said[1]] == [True, True]
        assert all("it unfreezes parameters during training" in text for text in said)
