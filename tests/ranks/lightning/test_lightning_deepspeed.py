"""Checkpoints under DeepSpeedStrategy on two ranks: resuming, other numbers of ranks, single files, DeepSpeed's own.

DeepSpeedStrategy under Trainer on two ranks against stock ddp, and faults of the original by name.

Tensor parallelism under Lightning's Trainer, by a DeepSpeed configuration: fp64 against plain PyTorch.
A ``training_step`` that returns ``None``: right on one device, refused by Lightning on several.

ColossalAI and DeepSpeed refused it on one as well.
What programs for Lightning do with ``.grad``: its report of norms, logging, and torch's clipping in hooks.
"""

import contextlib
import io
import json
import logging
import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from lightning_cases import STOCK, TWO, Ended, Recipe, check_same, kinds, run
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.strategies.deepspeed import DeepSpeed
from shardwise.strategies.namespace import LIGHTNING, Namespace, build
from shardwise.testing import assert_close, run_ranks
from tests.support.hybrid_setup import MAX_NORM, STEPS, Texts, made, optimizer_of, plain
from tests.support.lightning_setup import Toy, close, data, fit, since, stock, toy, trainer, weights, worst
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import campaign, full

RANKS = 2
BUCKET = 60  # elements, so that the small model has several chunks
Options = dict[str, Any]


def strategy(ns: Namespace = LIGHTNING, **arguments: Any) -> Any:
    if "config" not in arguments:
        arguments = {"reduce_bucket_size": BUCKET, **arguments}
    return build(ns, DeepSpeed, "strategies.ddp.DDPStrategy", "DeepSpeedStrategy")(**arguments)


def rank() -> int:
    return torch.distributed.get_rank()


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """The texts of warnings inside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield texts
    texts += [str(each.message) for each in caught]


def _faults(variant: Callable[..., str], run: Callable[[str], Any]) -> None:
    """Of the entries of a file."""
    faults: list[tuple[Options, str]] = [
        ({"net.0.weight": None}, r"missing \['net.0.weight'\]"),
        ({"extra": torch.ones(1)}, r"unexpected \['extra'\]"),
        ({"net.0.bias": torch.ones(3)}, r"net.0.bias: \(3,\) instead of \(16,\)"),
    ]
    for number, (changes, message) in enumerate(faults):
        with pytest.raises(RuntimeError, match=message):
            run(variant(f"fault-{number}", **changes))


def full_weights(directory: str, restores: str) -> None:
    """``restores``: the weights alone, or optimizers as well."""
    source = trainer(stock())
    source.fit(toy(), data())
    expected = weights(source)
    path = Path(directory) / "whole.ckpt"
    source.save_checkpoint(path)
    whole = torch.load(path, weights_only=False)

    def variant(name: str, **changes: Any) -> str:
        """The file with other entries in its state dict (or without them: None); every rank reads rank 0's."""
        state = {**whole, "state_dict": {**whole["state_dict"], **changes}}
        state["state_dict"] = {key: value for key, value in state["state_dict"].items() if value is not None}
        place = Path(directory) / f"{name}.ckpt"
        if rank() == 0:
            torch.save(state["state_dict"] if name == "bare" else state, place)
        torch.distributed.barrier()
        return str(place)

    def run(path: str, stage: int = 3, **arguments: Any) -> Any:
        made = trainer(strategy(stage=stage, load_full_weights=True, **arguments), max_epochs=1)
        made.test(toy(seed=9), data(), ckpt_path=path, verbose=False)
        return made

    if restores == "weights":
        for place in (str(path), variant("bare")):
            made = run(place)
            assert all(map(torch.equal, weights(made).values(), expected.values()))
            close(made)
        _faults(variant, run)
        return
    # Optimizers go on where the file has their state, and start anew with a warning where it has none.
    straight = fit(stock(), toy(), max_epochs=2)
    again = trainer(strategy(stage=3, load_full_weights=True), max_epochs=2)
    again.fit(toy(seed=9), data(), ckpt_path=str(path))
    assert worst(weights(again), straight) <= 1e-6
    close(again)
    again = trainer(strategy(stage=3, load_full_weights=True), max_epochs=2)
    del whole["optimizer_states"]
    with noted() as texts:
        again.fit(toy(seed=9), data(), ckpt_path=variant("weights"))
    assert any("optimizer states cannot be restored" in text for text in texts) == (rank() == 0)
    assert again.global_step == 8 and worst(weights(again), straight) > 1e-6
    close(again)
    again = trainer(strategy(stage=3, load_full_weights=True), max_epochs=2)
    del whole["lr_schedulers"]  # as save_weights_only leaves it
    again.fit(toy(seed=9), data(), ckpt_path=variant("only"))
    assert again.global_step == 8
    close(again)


@pytest.mark.parametrize("restores", ["weights", *full("optimizers")])
def test_load_full_weights_raises_for_missing_unexpected_and_wrongly_shaped_entries(
    restores: str, tmp_path: Path
) -> None:
    """Lightning collected these errors and never raised them."""
    run_ranks(RANKS, full_weights, str(tmp_path), restores, timeout=120.0)


def deepspeed_directories(root: str, goes_on: list[tuple[str, int]]) -> None:
    straight = fit(stock(), toy(schedule=True), max_epochs=2)
    after_one = fit(stock(), toy(schedule=True), max_epochs=1)
    for saved, stage in goes_on:
        path = f"{root}/{saved}.ckpt"
        tested = trainer(strategy(stage=stage))
        tested.test(toy(seed=9), data(), ckpt_path=f"{path}/checkpoint", verbose=False)
        assert worst(weights(tested), after_one) <= 1e-6
        close(tested)
        made = trainer(strategy(stage=stage), max_epochs=2)
        model = toy(schedule=True, seed=9)
        made.fit(model, data(), ckpt_path=path)
        assert (made.current_epoch, made.global_step) == (2, 8)
        assert model.lr_schedulers().get_last_lr() == [pytest.approx(0.05 * 0.7**4)]
        assert worst(weights(made), straight) <= 1e-6, saved
        close(made)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        trainer(strategy()).test(toy(), data(), ckpt_path=f"{root}/../empty", verbose=False)


@pytest.mark.parametrize("goes_on", [[("stage3", 1)], *full([("stage1", 3), ("stage2", 2)])], ids=["one", "others"])
def test_runs_that_deepspeed_saved_go_on(goes_on: list[tuple[str, int]], tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[2] / "data" / "lightning_deepspeed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "empty").mkdir()
    run_ranks(RANKS, deepspeed_directories, str(tmp_path / "ds"), goes_on, timeout=120.0)


class Partly(Toy):
    """Its first layer is frozen."""

    def build(self) -> None:
        super().build()
        assert isinstance(self.net, nn.Sequential)
        self.net[0].requires_grad_(False)


def frozen(directory: str) -> None:
    straight = fit(stock(), toy(body=Partly), max_epochs=2)
    for stage in (1, 3):
        path = f"{directory}/{stage}.ckpt"
        made = trainer(strategy(stage=stage, exclude_frozen_parameters=True))
        made.fit(toy(body=Partly), data())
        made.save_checkpoint(path)
        made.save_checkpoint(f"{path}-weights", weights_only=True)
        close(made)
        held = {name.removeprefix("model/") for name in open_checkpoint(path).tensors() if name.startswith("model/")}
        assert held == {f"net.{layer}.{kind}" for layer in (2, 4) for kind in ("weight", "bias")}
        again = trainer(strategy(stage=stage), max_epochs=2)
        again.fit(toy(body=Partly), data(), ckpt_path=path)
        assert worst(weights(again), straight) <= 1e-6
        close(again)
        for place in (path, f"{path}-weights"):
            made = trainer(strategy(stage=stage))
            made.test(toy(body=Partly), data(), ckpt_path=place, verbose=False)
            close(made)
            with pytest.raises(ValueError, match=r"net\.0\.weight"):  # trained here: it may not be missing
                made.test(toy(), data(), ckpt_path=place, verbose=False)
    whole = type("Whole", (LIGHTNING.load("plugins.io.TorchCheckpointIO"),), {})()
    made = trainer(strategy(exclude_frozen_parameters=True), plugins=[whole])
    with pytest.raises(Exception, match="exclude_frozen_parameters=True with checkpoint_io=Whole"):
        made.fit(toy(body=Partly), data())


@pytest.mark.full
def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(RANKS, frozen, str(tmp_path), timeout=120.0)


# ---- homes


# ---- configurations

CONFIG: Options = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "bf16": {"enabled": "auto"},
}


class Looking(Toy):
    """Remembers the configuration that the hook which builds the model meets."""

    def configure_model(self) -> None:
        self.configs = [*getattr(self, "configs", ()), dict(self.trainer.strategy.config)]  # type: ignore[attr-defined]
        self.build()


@on_ranks(RANKS, timeout=120.0)
def test_a_config_is_never_changed_completed_from_trainer_and_found_by_precedence(tmp_path: Path) -> None:
    """Lightning changed the dict, so that a second strategy of it failed."""
    given = json.loads(json.dumps(CONFIG))
    options: Options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    expected = fit(stock(), toy(), **options)
    for _ in range(2):  # a second strategy of the same dict failed
        assert worst(fit(strategy(config=given), toy(), **options), expected) <= 1e-6
        assert given == CONFIG
    made = trainer(strategy(config=given), **options)
    model = toy(body=Looking)
    made.fit(model, data(batch_size=3))
    assert model.configs == [made.strategy.config]
    assert made.strategy.config == {
        "zero_optimization": CONFIG["zero_optimization"],
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.05,
        "bf16": {"enabled": False},
    }
    close(made)
    made = trainer(strategy(stage=1), precision="bf16-mixed")
    model = toy(body=Looking)
    made.validate(model, data(batch_size=3), verbose=False)
    made.test(model, data(batch_size=3), verbose=False)  # the model is sharded already, and asked again
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16")
    assert [[found.get(name) for name in names] for found in model.configs] == [[1, 1, 0.0, {"enabled": True}]] * 2
    close(made)
    path = tmp_path / f"{rank()}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}), "utf-8")
    os.environ["PL_DEEPSPEED_CONFIG_PATH"] = str(path)
    try:
        with noted() as texts:
            assert strategy(stage=3).config == {"zero_optimization": {"stage": 1}}
            assert strategy(config={"zero_optimization": {"stage": 0}}).config["zero_optimization"]["stage"] == 0
        assert any(text.startswith("stage=3") and "a DeepSpeed config was given" in text for text in texts)
        path.unlink()
        with pytest.raises(Exception, match=r"the path does not exist.*PL_DEEPSPEED_CONFIG_PATH") as error:
            strategy()
        assert type(error.value).__name__ == "MisconfigurationException"
    finally:
        del os.environ["PL_DEEPSPEED_CONFIG_PATH"]


def contradictions() -> None:
    cases: list[tuple[Options, Options, str]] = [
        ({"gradient_accumulation_steps": 3}, {}, "gradient_accumulation_steps=3 .*accumulate_grad_batches=1"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "enable one of them"),
        (
            {"fp16": {"enabled": True}},
            {"precision": "bf16-mixed"},
            "enables fp16 and Trainer has precision='bf16-mixed'",
        ),
        (
            {"fp16": {"enabled": True}},
            {"precision": "64-true"},
            "precision='64-true', but the DeepSpeed config enables",
        ),
        ({"zero_optimisation": {"stage": 3}}, {}, "did you mean 'zero_optimization'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, {}, "WarmupLR has no such parameter"),
    ]
    for config, options, message in cases:
        with pytest.raises(Exception, match=message):
            fit(strategy(config=config), toy(), **options)
    fit(strategy(config={"gradient_accumulation_steps": 2}), toy(), accumulate_grad_batches=2)


def norms() -> None:
    """A norm of the config goes before Trainer's, which is not applied on top of it."""
    tight = fit(strategy(config={"gradient_clipping": 0.02}), toy())
    with noted() as texts:
        both = fit(strategy(config={"gradient_clipping": 0.02}), toy(), gradient_clip_val=0.001)
    assert all(map(torch.equal, tight.values(), both.values()))
    assert any("gradient_clip_val=0.001 of Trainer is not applied" in text for text in texts) == (rank() == 0)
    assert worst(tight, fit(stock(), toy(), gradient_clip_val=0.02)) <= 1e-6 < worst(tight, fit(stock(), toy()))


@pytest.mark.parametrize("task", [contradictions, *full(norms)])
def test_contradictions_are_clear_errors_and_the_norm_of_a_config_wins(task: Callable[[], None]) -> None:
    run_ranks(RANKS, task, timeout=120.0)


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.full
def test_optimizer_and_scheduler_of_the_config() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}}
    schedule = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.7}}
    expected = fit(strategy(stage=2), toy(schedule=True), max_epochs=2)

    class Uncalled(Toy):
        def configure_optimizers(self) -> Any:
            raise AssertionError("the configuration has an optimizer")

    config = {
        "optimizer": optimizer,
        "scheduler": schedule,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": BUCKET},
    }
    made = trainer(strategy(config=config), max_epochs=2)
    made.fit(toy(body=Uncalled), data())
    assert all(map(torch.equal, weights(made).values(), expected.values()))
    assert made.strategy.lr_scheduler_configs[0].interval == "step"
    assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.7**4)
    close(made)
    # A schedule alone is for the module's own optimizer; the module's own schedule goes before it.
    alone = fit(strategy(config={k: v for k, v in config.items() if k != "optimizer"}), toy(), max_epochs=2)
    assert all(map(torch.equal, alone.values(), expected.values()))
    with noted() as texts:
        fit(strategy(config={"scheduler": schedule}), toy(schedule=True))
    assert any("configure_optimizers gave a scheduler" in text for text in texts)


# ---- precision


# ---- logs


TOLD: Options = {"zero_optimization": {"stage": 2}, "steps_per_print": 2}


def logged(arguments: Options, loader: Any) -> tuple[list[str], str]:
    """The lines about steps, and the batch size that is known."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        made = trainer(strategy(**{"logging_level": logging.INFO, **arguments}))
        made.fit(toy(), loader)
    lines = [line for line in output.getvalue().splitlines() if "step" in line]
    size = str(made.strategy.config["train_micro_batch_size_per_gpu"])
    close(made)
    return lines, size


def told() -> tuple[list[str], str]:
    return logged({"config": TOLD}, data())


def test_progress_is_logged_by_rank_0() -> None:
    (lines, size), (others, _) = run_ranks(RANKS, told)
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"]
    assert (size, others) == ("4", [])


HYBRID_RANKS, BATCH, TP = 4, 2, 2
REPLICAS = HYBRID_RANKS // TP


class Language(LIGHTNING.load("LightningModule")):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = made("llama")
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.seen.append(batch["input_ids"])
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net)


def shuffled(count: int) -> Subset[dict[str, Tensor]]:
    """The texts in an order that Trainer's shuffling of the first epoch puts right."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return Subset(Texts(count), order.argsort().tolist())


@on_ranks(HYBRID_RANKS, timeout=120.0)
@pytest.mark.parametrize("stage", [*full(1), *campaign(3)])
def test_a_configuration_with_tensor_parallelism(stage: int, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": MAX_NORM}
    ours = strategy(config=config | {"tensor_parallel": {"autotp_size": TP}})
    made_trainer = trainer(ours, max_epochs=1, precision="64-true")
    model = Language()
    made_trainer.fit(model, DataLoader(shuffled(STEPS * BATCH * REPLICAS), BATCH))
    assert ours.distributed_sampler_kwargs == {"num_replicas": REPLICAS, "rank": dist.get_rank() // TP}
    assert ours.session.mesh.tensor.size == TP and len(model.seen) == STEPS
    told = everywhere(torch.stack(model.seen))
    assert torch.equal(told[0], told[1]) and torch.equal(told[2], told[3]) and not torch.equal(told[0], told[2])
    *_, (_, _, values) = plain("llama", REPLICAS, BATCH, True)
    whole = {name.removeprefix("net."): value for name, value in ours.lightning_module_state_dict().items()}
    if dist.get_rank() == 0:
        assert_close(whole, values, 1e-9, "parameters")
    made_trainer.save_checkpoint(tmp_path / "last.ckpt")
    close(made_trainer)
    again = trainer(strategy(config=config), max_epochs=1, precision="64-true")
    other = Language()
    again.fit(other, DataLoader(Texts(STEPS * BATCH * HYBRID_RANKS), BATCH), ckpt_path=tmp_path / "last.ckpt")
    assert not other.seen, "its only epoch is over"
    whole = {name.removeprefix("net."): value for name, value in again.strategy.lightning_module_state_dict().items()}
    if dist.get_rank() == 0:
        assert_close(whole, values, 1e-9, "parameters without tensor parallelism")
    close(again)


class Skipping(Toy):
    """Leaves out every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 2 else self.loss(batch)


def skipped(kind: str) -> list[Ended]:
    """Lightning calls the optimizer for those, too, which has no gradients then; also within an accumulation."""
    found = []
    for accumulate in (1, 2):
        recipe = Recipe(accumulate=accumulate)
        with warnings.catch_warnings(action="ignore"):
            found.append(run(kind, recipe, toy(body=Skipping)))
    return found


@pytest.mark.parametrize("kind", ["colossalai", *full("deepspeed_1", "fully_sharded")])
def test_a_training_step_may_return_none_on_one_device(kind: str) -> None:
    (expected,), (found,) = (run_ranks(1, skipped, each) for each in (STOCK, kind))
    for ours, stock_run in zip(found, expected, strict=True):
        check_same([ours], [stock_run])


def skipped_by_one(kind: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        run(kind, Recipe(), toy(body=Skipping))
    return str(caught.value)


def test_a_training_step_may_not_return_none_on_several() -> None:
    """Lightning's own rule, since 2.3."""
    if not since(2, 3):
        pytest.skip("Lightning 2.2 has no such rule")
    assert all("returning None in distributed training" in text for text in run_ranks(RANKS, skipped_by_one, TWO[1]))


class _Reporting(Toy):
    """Logs the norms of its gradients, clips them by torch, and looks at one before it is dropped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)  # type: ignore[arg-type]
        self.log_dict(norms)  # type: ignore[attr-defined]
        clipped = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)  # type: ignore[attr-defined]
        self.log("clipped", clipped)  # type: ignore[attr-defined]

    def on_after_backward(self) -> None:
        largest = torch.stack([p.grad.abs().max() for p in self.parameters()])  # type: ignore[attr-defined]
        self.log("largest", largest.max())  # type: ignore[attr-defined]


def reported(kind: str) -> Ended:
    return run(kind, Recipe(batches=4, epochs=1, optimizer="sgd"), toy(body=_Reporting))


@pytest.fixture(scope="module")
def expected() -> list[Ended]:
    return run_ranks(RANKS, reported, STOCK, timeout=120.0)


@pytest.mark.parametrize("kind", kinds("deepspeed_3"))
def test_norms_are_reported_and_clipped(kind: str, expected: list[Ended]) -> None:
    assert all(each.metrics["clipped"] > 0.05 and "grad_2.0_norm_total" in each.metrics for each in expected)
    check_same(run_ranks(RANKS, reported, kind, timeout=120.0), expected, most=1e-5)
