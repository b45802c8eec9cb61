"""DeepSpeedStrategy under Trainer on two ranks, compared with stock ddp.

Covers full weights from single files, runs that DeepSpeed saved, configurations, tensor parallelism (in fp64 against
plain PyTorch), and a ``training_step`` that returns ``None``. Docstrings name faults of the original.
"""

import contextlib
import copy
import io
import json
import logging
import os
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning_cases import STOCK, TWO, Partly, Recipe, check_same, ended, run
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.strategies.deepspeed import DeepSpeed
from shardwise.strategies.lightning_packages import LIGHTNING, Namespace, build
from shardwise.testing import assert_close
from tests.support.ds_setup import optimizer_block
from tests.support.hybrid_setup import MAX_NORM, STEPS, Texts, made, optimizer_of, plain
from tests.support.lightning_setup import Toy, close, data, fit, since, stock, toy, trainer, weights, worst
from tests.support.on_ranks import everywhere, on_ranks, raises
from tests.support.sets import campaign, full

RANKS = 2
BUCKET = 60  # elements, so that the small model has several chunks
Options = dict[str, Any]


def strategy(ns: Namespace = LIGHTNING, **arguments: Any) -> Any:
    if "config" not in arguments:
        arguments = {"reduce_bucket_size": BUCKET, **arguments}
    return build(ns, DeepSpeed, "strategies.ddp.DDPStrategy", "DeepSpeedStrategy")(**arguments)


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Collect the texts of warnings inside this context."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield texts
    texts += [str(each.message) for each in caught]


FAULTS: list[tuple[Options, str]] = [
    ({"net.0.weight": None}, "missing: net.0.weight"),
    ({"extra": torch.ones(1)}, "unexpected: extra"),
    ({"net.0.bias": torch.ones(3)}, r"net.0.bias: \(3,\) instead of \(16,\)"),
]


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize("restores", ["weights", *full("optimizers")])
def test_load_full_weights_raises_for_wrong_entries(restores: str, tmp_path: Path) -> None:
    """Missing, unexpected and wrongly shaped entries raise; Lightning collected these errors and never raised them.

    ``restores``: weights only, or optimizers as well.
    """
    source = trainer(stock())
    source.fit(toy(), data())
    expected = weights(source)
    path = tmp_path / "whole.ckpt"
    source.save_checkpoint(path)
    whole = torch.load(path, weights_only=False)

    def variant(name: str, **changes: Any) -> Path:
        """Write the file with entries changed in its state dict, or removed (``None``); every rank reads rank 0's."""
        state = {**whole, "state_dict": {**whole["state_dict"], **changes}}
        state["state_dict"] = {key: value for key, value in state["state_dict"].items() if value is not None}
        if dist.get_rank() == 0:
            torch.save(state["state_dict"] if name == "bare" else state, tmp_path / name)
        dist.barrier()
        return tmp_path / name

    def run(path: Path) -> None:
        made = trainer(strategy(stage=3, load_full_weights=True))
        made.test(toy(seed=9), data(), ckpt_path=path, verbose=False)
        assert worst(ended(made).weights, expected) == 0.0

    def go_on(path: Path) -> tuple[list[str], float]:
        with noted() as texts:
            again = trainer(strategy(stage=3, load_full_weights=True), max_epochs=2)
            again.fit(toy(seed=9), data(), ckpt_path=path)
        assert again.global_step == 8
        return texts, worst(ended(again).weights, straight)

    if restores == "weights":
        run(path)
        run(variant("bare"))
        for number, (changes, message) in enumerate(FAULTS):
            raises(RuntimeError, message, run, variant(f"fault-{number}", **changes))
        return
    # Optimizers resume if the file has their state; without it they start with empty state and a warning.
    straight = fit(stock(), toy(), max_epochs=2)
    assert go_on(path)[1] <= 1e-6
    del whole["optimizer_states"]
    texts, difference = go_on(variant("weights"))
    assert any("optimizer states cannot be restored" in text for text in texts) == (dist.get_rank() == 0)
    assert difference > 1e-6
    del whole["lr_schedulers"]  # as save_weights_only writes it
    go_on(variant("only"))


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize(("saved", "stage"), [("stage3", 1), *full(("stage1", 3), ("stage2", 2))])
def test_runs_that_deepspeed_saved_are_resumed(saved: str, stage: int, tmp_path: Path) -> None:
    root = tmp_path / str(dist.get_rank())
    with tarfile.open(Path(__file__).parents[2] / "data" / "lightning_deepspeed.tar.xz") as archive:
        archive.extractall(root, filter="data")
    path = root / "ds" / f"{saved}.ckpt"
    tested = trainer(strategy(stage=stage))
    tested.test(toy(seed=9), data(), ckpt_path=path / "checkpoint", verbose=False)
    assert worst(ended(tested).weights, fit(stock(), toy(schedule=True))) <= 1e-6
    made = trainer(strategy(stage=stage), max_epochs=2)
    model = toy(schedule=True, seed=9)
    made.fit(model, data(), ckpt_path=path)
    assert (made.current_epoch, made.global_step) == (2, 8)
    assert model.lr_schedulers().get_last_lr() == [pytest.approx(0.05 * 0.7**4)]
    assert worst(ended(made).weights, fit(stock(), toy(schedule=True), max_epochs=2)) <= 1e-6
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        trainer(strategy()).test(toy(), data(), ckpt_path=root, verbose=False)


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.full
def test_frozen_parameters_can_be_excluded(tmp_path: Path) -> None:
    straight = fit(stock(), toy(body=Partly), max_epochs=2)
    for stage in (1, 3):
        path = f"{tmp_path}/{stage}.ckpt"
        made = trainer(strategy(stage=stage, exclude_frozen_parameters=True))
        made.fit(toy(body=Partly), data())
        made.save_checkpoint(path)
        made.save_checkpoint(f"{path}-weights", weights_only=True)
        close(made)
        held = {name.removeprefix("model/") for name in open_checkpoint(path).tensors() if name.startswith("model/")}
        assert held == {f"net.{layer}.{kind}" for layer in (2, 4) for kind in ("weight", "bias")}
        again = fit(strategy(stage=stage), toy(body=Partly), max_epochs=2, ckpt_path=path)
        assert worst(again, straight) <= 1e-6
        for place in (path, f"{path}-weights"):
            made = trainer(strategy(stage=stage))
            made.test(toy(body=Partly), data(), ckpt_path=place, verbose=False)
            close(made)
            with pytest.raises(ValueError, match=r"net\.0\.weight"):  # trained here: it may not be missing
                made.test(toy(), data(), ckpt_path=place, verbose=False)
    whole = type("Whole", (LIGHTNING.load("plugins.io.TorchCheckpointIO"),), {})()
    with pytest.raises(Exception, match="exclude_frozen_parameters=True with checkpoint_io=Whole"):
        fit(strategy(exclude_frozen_parameters=True), toy(body=Partly), plugins=[whole])


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
    """Records the configuration that the hook which builds the model can read."""

    def configure_model(self) -> None:
        self.configs = [*getattr(self, "configs", ()), dict(self.trainer.strategy.config)]  # type: ignore[attr-defined]
        self.build()


@on_ranks(RANKS, timeout=120.0)
def test_config_is_copied_completed_from_the_trainer_and_found_by_precedence(tmp_path: Path) -> None:
    """Lightning changed the dict, so a second strategy of the same dict failed."""
    given = copy.deepcopy(CONFIG)
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
    made.test(model, data(batch_size=3), verbose=False)  # the model is sharded already, and the hook runs again
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16")
    assert [[found.get(name) for name in names] for found in model.configs] == [[1, 1, 0.0, {"enabled": True}]] * 2
    close(made)
    path = tmp_path / f"{dist.get_rank()}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}), "utf-8")
    with mock.patch.dict(os.environ, {"PL_DEEPSPEED_CONFIG_PATH": str(path)}):
        with noted() as texts:
            assert strategy(stage=3).config == {"zero_optimization": {"stage": 1}}
        assert any(text.startswith("stage=3") and "a DeepSpeed config was given" in text for text in texts)
        path.unlink()
        with pytest.raises(Exception, match=r"the path does not exist.*PL_DEEPSPEED_CONFIG_PATH") as error:
            strategy()
        assert type(error.value).__name__ == "MisconfigurationException"


@on_ranks(RANKS, timeout=120.0)
def test_contradictions_are_errors_and_the_norm_of_the_config_applies() -> None:
    """A norm in the config applies, and the Trainer's is not applied on top of it."""
    for config, message in (
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3 .*accumulate_grad_batches=1"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "enable one of them"),
        ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "WarmupLR has no such parameter"),
    ):
        with pytest.raises(Exception, match=message):
            fit(strategy(config=config), toy())
    with pytest.raises(Exception, match="precision='64-true', but the DeepSpeed config enables"):
        fit(strategy(config={"fp16": {"enabled": True}}), toy(), precision="64-true")
    tight = fit(strategy(config={"gradient_clipping": 0.02}), toy())
    with noted() as texts:
        both = fit(strategy(config={"gradient_clipping": 0.02}), toy(), gradient_clip_val=0.001)
    assert worst(tight, both) == 0.0
    assert any("gradient_clip_val=0.001 of Trainer is not applied" in text for text in texts) == (dist.get_rank() == 0)
    assert worst(tight, fit(stock(), toy(), gradient_clip_val=0.02)) <= 1e-6 < worst(tight, fit(stock(), toy()))


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.full
def test_optimizer_and_scheduler_of_the_config() -> None:
    schedule = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.7}}
    expected = fit(strategy(stage=2), toy(schedule=True), max_epochs=2)

    class Uncalled(Toy):
        def configure_optimizers(self) -> Any:
            raise AssertionError("the configuration has an optimizer")

    config = {
        "optimizer": optimizer_block("AdamW", lr=0.05, weight_decay=0.1, eps=1e-3),
        "scheduler": schedule,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": BUCKET},
    }
    made = trainer(strategy(config=config), max_epochs=2)
    made.fit(toy(body=Uncalled), data())
    assert worst(weights(made), expected) == 0.0
    assert made.strategy.lr_scheduler_configs[0].interval == "step"
    assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.7**4)
    close(made)
    # A schedule without an optimizer is for the module's own optimizer; the module's own schedule precedes it.
    del config["optimizer"]
    assert worst(fit(strategy(config=config), toy(), max_epochs=2), expected) == 0.0
    with noted() as texts:
        fit(strategy(config={"scheduler": schedule}), toy(schedule=True))
    assert any("configure_optimizers gave a scheduler" in text for text in texts)


@on_ranks(RANKS)
def test_progress_is_logged_by_rank_0() -> None:
    config = {"zero_optimization": {"stage": 2}, "steps_per_print": 2}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        made = trainer(strategy(config=config, logging_level=logging.INFO))
        made.fit(toy(), data())
    lines = [line.split(",")[0] for line in output.getvalue().splitlines() if "step" in line]
    assert lines == (["step=2", "step=4"] if dist.get_rank() == 0 else [])
    assert made.strategy.config["train_micro_batch_size_per_gpu"] == 4
    close(made)


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
    """Return the texts in an order that the Trainer's shuffling of the first epoch sorts again."""
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
    """Skips every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 2 else self.loss(batch)


@on_ranks(1)
@pytest.mark.parametrize("kind", ["colossalai", *full("deepspeed_1", "fully_sharded")])
def test_a_training_step_may_return_none_on_one_device(kind: str) -> None:
    """Lightning steps the optimizer for skipped batches, too, which has no gradients then; also within an accumulation.

    ColossalAI and DeepSpeed refused it even on one device.
    """
    warnings.simplefilter("ignore")
    for accumulate in (1, 2):
        found, expected = (run(each, Recipe(accumulate=accumulate), toy(body=Skipping)) for each in (kind, STOCK))
        check_same(found, expected)


@on_ranks(RANKS)
@pytest.mark.skipif(not since(2, 3), reason="Lightning 2.2 has no such rule")
def test_a_training_step_may_not_return_none_on_several() -> None:
    """Lightning itself refuses it since 2.3."""
    raises(RuntimeError, "returning None in distributed training", run, TWO[1], Recipe(), toy(body=Skipping))
