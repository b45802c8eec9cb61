"""DeepSpeedStrategy under Trainer on two ranks against stock ddp, and faults of the original by name."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, build
from shardwise.strategies.precision import ShardedPrecision
from shardwise.testing import run_ranks
from tests.support.lightning_deepspeed_setup import BUCKET, RANKS, Options, noted, rank, strategy
from tests.support.lightning_setup import Toy, close, data, fit, stock, toy, trainer, weights, worst
from tests.support.sets import full


def other_namespace() -> float:
    ns = PYTORCH_LIGHTNING
    again = pickle.loads(pickle.dumps(strategy(ns, stage=3)))  # as spawned processes receive it
    assert type(again) is type(strategy(ns)) and again.config == strategy(ns, stage=3).config
    oracle = fit(stock(ns), toy(ns), ns)
    return worst(fit(strategy(ns, stage=3), toy(ns), ns), oracle)


@pytest.mark.full
def test_under_pytorch_lightning() -> None:
    assert max(run_ranks(RANKS, other_namespace, timeout=120.0)) <= 1e-6


# ---- homes

OFFLOADED: dict[str, Options] = {
    "optimizer on the host": {"stage": 2, "offload_optimizer": True},
    "all on the host": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "all on a disk": {
        "stage": 3,
        "offload_optimizer": True,
        "offload_parameters": True,
        "offload_optimizer_device": "nvme",
        "offload_params_device": "nvme",
        "remote_device": "nvme",
        "max_in_cpu": 0,
        "optimizer_buffer_count": 2,
        "block_size": 4096,
    },
}


def offloaded(name: str, directory: str) -> tuple[bool, dict[str, int]]:
    arguments = OFFLOADED[name]
    expected = fit(strategy(stage=arguments["stage"]), toy(where="configure_model"))
    path = {"nvme_path": directory} if "disk" in name else {}
    made = trainer(strategy(**arguments, **path))
    made.fit(toy(where="configure_model"), data())
    equal = all(map(torch.equal, weights(made).values(), expected.values()))
    memory = made.strategy.session.memory().by_tier
    close(made)
    return equal, {str(tier): sum(kinds.values()) for tier, kinds in memory.items()}


@pytest.mark.parametrize("name", [*full("optimizer on the host", "all on the host"), "all on a disk"])
def test_offloading_to_host_and_disk_changes_no_bit(name: str, tmp_path: Path) -> None:
    for equal, by_tier in run_ranks(RANKS, offloaded, name, str(tmp_path), timeout=120.0):
        assert equal
        tier = "disk" if "disk" in name else "host"
        assert any(tier in key.lower() and size > 0 for key, size in by_tier.items()), by_tier


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


def configured(directory: str) -> None:
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
    path = Path(directory) / f"{rank()}.json"
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


def test_a_config_is_never_changed_completed_from_trainer_and_found_by_precedence(tmp_path: Path) -> None:
    """Lightning changed the dict, so that a second strategy of it failed."""
    run_ranks(RANKS, configured, str(tmp_path), timeout=120.0)


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


def by_config() -> None:
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


@pytest.mark.full
def test_optimizer_and_scheduler_of_the_config() -> None:
    run_ranks(RANKS, by_config, timeout=120.0)


# ---- precision


def loss_scales() -> None:
    ours = build(LIGHTNING, ShardedPrecision, "plugins.precision.precision.Precision", "ShardedPrecision")
    made = trainer(strategy(stage=3, loss_scale=64, precision_plugin=ours("16-mixed")))
    made.fit(toy(), data())
    session = made.strategy.session
    assert session.plan.precision.param_dtype is torch.float16 and session.optimizer.scaler.scale == 64.0
    close(made)

    class Overflowing(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * math.inf

    plugin = ours("16-mixed")
    lowest = strategy(stage=1, initial_scale_power=1, hysteresis=1, min_loss_scale=1, precision_plugin=plugin)
    failing = trainer(lowest)
    with pytest.raises(RuntimeError, match="at its minimum already"):
        failing.fit(toy(body=Overflowing), data())
    with noted() as texts:
        fit(strategy(loss_scale=8), toy())
    assert any("loss_scale=8 without effect" in text for text in texts) == (rank() == 0)


@pytest.mark.campaign
def test_the_loss_scale_follows_its_arguments() -> None:
    run_ranks(RANKS, loss_scales, timeout=120.0)


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
