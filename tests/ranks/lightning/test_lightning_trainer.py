"""Features of the Trainer, with each strategy, compared with Lightning's own ``ddp``."""

import shutil
import tempfile
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from lightning_cases import KINDS, STOCK, TWO, Ended, Recipe, check_same, ended, kinds, rows, run, strategy
from torch import Tensor, nn

from shardwise.strategies.lightning_packages import LIGHTNING
from tests.support.lightning_setup import HIDDEN, OUT, Silent, Toy, close, data, toy, trainer, weights, worst
from tests.support.on_ranks import on_ranks, raises

RANKS = 2


def callback(path: str, **arguments: Any) -> Any:
    return LIGHTNING.load(f"callbacks.{path}")(**arguments)


Scenario = Callable[[str], Ended]


def accumulation_changes(kind: str) -> Ended:
    """Accumulate 1, then 3, then 2 batches per step, with 5 batches per epoch."""
    scheduler = callback("GradientAccumulationScheduler", scheduling={0: 1, 1: 3, 2: 2})
    return run(kind, Recipe(epochs=3), callbacks=[scheduler])


def saving_within_an_accumulation(kind: str) -> Ended:
    """Save after every second batch while three make a step: the accumulated gradients stay."""
    with tempfile.TemporaryDirectory() as folder:
        saver = callback("ModelCheckpoint", dirpath=folder, save_top_k=-1, filename="{step}", monitor="val_loss")
        recipe = Recipe(accumulate=3, clip=0.05)
        found = run(kind, recipe, callbacks=[saver], enable_checkpointing=True, val_check_interval=2)
        dist.barrier()
    assert len(saver.best_k_models) >= 2
    return found


def fit_twice(kind: str) -> Ended:
    """Continue with the same Trainer; then train the trained model with another one."""
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
    """Resume once: the callback sets the optimizer's groups again."""
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
    """ColossalAI and DeepSpeed ignored this hook, with a warning."""
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
    """Compile the full LightningModule; ZeRO-3 and FSDP refused it or were wrong. The oracle runs the original
    module."""
    recipe, model = Recipe(batches=3, epochs=1), toy(body=Silent)
    if kind == STOCK:
        return run(kind, recipe, model)
    try:
        return run(kind, recipe, torch.compile(model, backend="eager"))
    finally:
        torch._dynamo.reset()


def evaluated_first(kind: str) -> Ended:
    """The old ColossalAI raised "You should run a completed iteration as your warmup iter"."""
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


class _Reporting(Toy):
    """Logs the norms of its gradients, clips them by torch, and reads one before it is freed."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))  # type: ignore[attr-defined, arg-type]
        clipped = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)  # type: ignore[attr-defined]
        self.log("clipped", clipped)  # type: ignore[attr-defined]

    def on_after_backward(self) -> None:
        largest = torch.stack([p.grad.abs().max() for p in self.parameters()])  # type: ignore[attr-defined]
        self.log("largest", largest.max())  # type: ignore[attr-defined]


def gradients_are_reported_and_clipped(kind: str) -> Ended:
    found = run(kind, Recipe(batches=4, epochs=1, optimizer="sgd"), toy(body=_Reporting))
    assert found.metrics["clipped"] > 0.05 and "grad_2.0_norm_total" in found.metrics
    return found


class _InHook(Toy):
    def configure_model(self) -> None:
        self.seen.append("built" if self.net is None else "kept")
        self.build()


class _InOldHook(_InHook):
    def configure_sharded_model(self) -> None:
        super().configure_model()

    configure_model = LIGHTNING.load("LightningModule").configure_model  # as if it were not overridden


def built_in_a_hook(kind: str, body: type = _InHook, hook: str = "configure_model") -> Ended:
    """The hook runs at every entry point; the trained model is the one that was built first."""
    model = toy(body=body, where=hook)
    made = trainer(strategy(kind))
    assert model.net is None
    made.validate(model, data(1, seed=1), verbose=False)
    made.fit(model, data())
    trained = weights(made)
    made.test(model, data(1, seed=1), verbose=False)
    assert model.seen == ["built", "kept", "kept"]
    found = ended(made)
    assert worst(found.weights, trained) == 0.0
    return found


def built_in_the_old_hook(kind: str) -> Ended:
    return built_in_a_hook(kind, _InOldHook, "configure_sharded_model")


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
        gradients_are_reported_and_clipped,
        built_in_a_hook,
        built_in_the_old_hook,
    )
}


# Each scenario at least once. More often where an engine plan has its own code (deepspeed_1 alone has unsharded
# gradients between batches), and where both old strategies were wrong.
QUICK = [
    *product(["colossalai"], ["own_optimizer_step", "evaluated_first", "built_in_a_hook"]),
    ("deepspeed_1", "saving_within_an_accumulation"),
    *product(["deepspeed_3"], ["accumulation_changes", "own_backward", "two_optimizers_by_hand"]),
    ("deepspeed_3", "gradients_are_reported_and_clipped"),
]
FULL = [
    *product(["colossalai"], ["accumulation_changes", "own_backward", "two_optimizers_by_hand"]),
    ("deepspeed_1", "two_optimizers_by_hand"),
    *product(["deepspeed_3"], ["fit_twice", "freezing", "own_clipping", "compiled", "built_in_the_old_hook"]),
]
assert {name for _, name in QUICK + FULL} == set(SCENARIOS)


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize(("kind", "name"), rows(product(KINDS, SCENARIOS), QUICK, FULL))
def test_scenario_equals_stock_ddp(kind: str, name: str) -> None:
    warnings.simplefilter("ignore")
    check_same(SCENARIOS[name](kind), SCENARIOS[name](STOCK), most=1e-5 if "reported" in name else 1e-6)


# ---- hooks that build the model


class _Rebuilds(Toy):
    def configure_model(self) -> None:
        self.net = None
        self.build()


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai", of=TWO))
def test_hook_that_builds_again_does_not_discard_training(kind: str) -> None:
    model = toy(body=_Rebuilds)
    made = trainer(strategy(kind))
    made.fit(model, data(2))
    trained = weights(made)
    with pytest.warns(UserWarning, match="built modules again"):
        made.test(model, data(1, seed=1), verbose=False)
    assert worst(ended(made).weights, trained) == 0.0


# ---- decisions that ranks must share


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("colossalai", "deepspeed_3", of=TWO))
def test_decisions_reach_every_rank(kind: str) -> None:
    """ColossalAI's ``reduce`` returned its result on rank 0 only, so other ranks stopped and saved at other times."""
    made = trainer(strategy(kind))
    made.fit(toy(), data(1))
    decide, mine = made.strategy.reduce_boolean_decision, dist.get_rank() == 1
    assert (decide(mine, all=True), decide(mine, all=False)) == (False, True)
    assert decide(True, all=True) and decide(True, all=False)
    close(made)


class _OneRankStops(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank = dist.get_rank()
        self.log("mine", 1.0 - self.current_epoch * (rank == 0), sync_dist=False)  # type: ignore[attr-defined]


@on_ranks(RANKS)
@pytest.mark.parametrize("kind", kinds("deepspeed_3", "colossalai", of=TWO))
def test_early_stopping_of_one_rank_stops_all(kind: str) -> None:
    """Rank 1's metric does not improve, rank 0's does."""
    warnings.simplefilter("ignore")
    made = trainer(strategy(kind), max_epochs=9, callbacks=[callback("EarlyStopping", monitor="mine", patience=1)])
    made.fit(toy(body=_OneRankStops), data(1), data(1))
    assert made.current_epoch == 2
    close(made)


# ---- refusals


@on_ranks(1)
def test_callbacks_that_average_or_unfreeze_are_refused() -> None:
    """tests/unit/lightning/test_lightning_classes.py has every such callback."""
    for each, why in (
        (callback("StochasticWeightAveraging", swa_lrs=0.1), "it averages and exchanges unsharded parameters"),
        (_Unfreezes(), "it unfreezes parameters during training"),
    ):
        made = trainer(strategy("colossalai"), callbacks=[each])
        raises(NotImplementedError, f"{type(each).__name__} with .*Strategy: {why}", made.fit, toy(), data(1))
