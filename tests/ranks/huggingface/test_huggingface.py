"""``shardwise.huggingface`` on two ranks, compared with the plain Trainer or a plain loop in one process.

The model computes in fp32 without dropout; losses, gradient norms, learning rates and weights agree within 1e-5
(relative to each tensor's largest element), since sums over a batch are added in another order.
"""

import errno
import functools
import json
import math
import os
import runpy
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.core.checkpoint import CheckpointError
from shardwise.core.optim import HybridAdam
from shardwise.plan import Plan, replicated, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.huggingface_setup import RANKS, arguments, gpt2, launched, make, quiet, rows, weights
from tests.support.on_ranks import assert_refused, on_ranks, raises
from tests.support.sets import campaign

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[3] / "examples" / "huggingface_trainer.py"
RTOL = 1e-5
PLANS: dict[str, Plan] = {"ddp": replicated(), "zero1": zero(1), "zero2": zero(2), "zero3": zero(3)}


Outcome = tuple[list[dict[str, float]], dict[str, Tensor]]
KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss")


def outcome(trainer: Any, folder: str, resume: Any = None) -> Outcome:
    """The logged numbers, and the weights as ``from_pretrained`` reads them."""
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(folder)
    history = [{key: entry[key] for key in KEYS if key in entry} for entry in trainer.state.log_history]
    if dist.is_initialized():
        dist.barrier()
    return [entry for entry in history if entry], weights(folder)


def plain_trainer(folder: str) -> Outcome:
    """Return a plain Trainer; 24 training rows are three batches of 8, so the last update of an epoch has one pass."""
    from transformers import Trainer

    with launched(), quiet():
        trainer = Trainer(gpt2(), arguments(folder, 8), train_dataset=rows()[:24], eval_dataset=rows()[24:])
        return outcome(trainer, os.path.join(folder, "model"))


def sharded_trainer(name: str, folder: str, resume: str | None = None) -> Outcome:
    from shardwise.huggingface import MetricsCallback

    records: dict[int, Any] = {}
    with launched(), quiet():
        trainer = make(folder, PLANS[name])
        trainer.add_callback(MetricsCallback(lambda step, row: records.update({step: (row["loss"], row["grad_norm"])})))
        result = outcome(trainer, os.path.join(folder, "model"), resume)
        log = {each["step"]: (each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each}
        assert records.items() <= log.items() and bool(records) == (dist.get_rank() == 0)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(result[0][-1]["eval_loss"], rel=1e-6)
        trainer.accelerator.close()
        return result


def check(found: Outcome, expected: Outcome, rtol: float = RTOL) -> None:
    assert len(found[0]) == len(expected[0])
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=rtol, abs=1e-12)
        assert not any(map(math.isnan, mine.values()))
    assert_close(found[1], expected[1], rtol, "the saved model")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Outcome]:
    folder = str(tmp_path_factory.mktemp("plain"))
    return folder, plain_trainer(folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Outcome]]:
    """Train without interruption at stage 3; return the outcome and the directory of checkpoints."""
    folder = str(tmp_path_factory.mktemp("straight"))
    return folder, run_ranks(RANKS, sharded_trainer, "zero3", folder, timeout=120.0)


def test_the_trainer_equals_the_plain_one_at_stage_3(
    plain: tuple[str, Outcome], straight: tuple[str, list[Outcome]]
) -> None:
    for found in straight[1]:
        check(found, plain[1])
    assert min(entry["grad_norm"] for entry in plain[1][0] if "grad_norm" in entry) > 0.1  # clipping changes something


@pytest.mark.full
@pytest.mark.parametrize(("name", "resumes"), [("ddp", ""), ("zero1", "straight"), ("zero3", "plain")])
def test_the_trainer_equals_the_plain_one_and_resumes_other_checkpoints(
    name: str, resumes: str, plain: tuple[str, Outcome], straight: tuple[str, list[Outcome]], tmp_path: Path
) -> None:
    """It resumes the plain Trainer's checkpoint, and one of another plan."""
    folders = {"": None, "plain": f"{plain[0]}/checkpoint-2", "straight": f"{straight[0]}/checkpoint-2"}
    for found in run_ranks(RANKS, sharded_trainer, name, str(tmp_path), folders[resumes], timeout=120.0):
        check(found, plain[1])


def test_resuming_equals_an_uninterrupted_run_bit_for_bit(straight: tuple[str, list[Outcome]], tmp_path: Path) -> None:
    checkpoint, expected = f"{straight[0]}/checkpoint-2", straight[1][0]
    for found in run_ranks(RANKS, sharded_trainer, "zero3", str(tmp_path), checkpoint, timeout=120.0):
        assert_close(found[1], expected[1], 0.0, "resumed")
        assert found[0] == expected[0]  # the checkpoint has the log history


@on_ranks(RANKS, timeout=120.0)
def test_the_best_model_is_loaded_and_training_continues(tmp_path: Path) -> None:
    """The first model is the best one here, since a larger loss is set to be better; the same trainer then trains
    again."""
    folder = str(tmp_path)
    with launched(), quiet():
        options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
        trainer = make(folder, PLANS["zero3"], **options)
        trainer.train()
        trainer.save_model(os.path.join(folder, "model"))
        dist.barrier()
        best, last = weights(str(trainer.state.best_model_checkpoint)), weights(os.path.join(folder, "checkpoint-4"))
        assert_close(weights(os.path.join(folder, "model")), best, 0.0, "the best model")
        assert not torch.equal(best["transformer.wte.weight"], last["transformer.wte.weight"])
        loss = trainer.evaluate()["eval_loss"]
        trainer.args.learning_rate = 1e-3
        trainer.train()
        assert math.isfinite(loss) and math.isfinite(trainer.evaluate()["eval_loss"])
        trainer.accelerator.close()


def in_bf16(folder: str) -> Outcome:
    with launched(), quiet():
        trainer = make(folder, zero(3), bf16=True)
        found = outcome(trainer, os.path.join(folder, "model"))
        assert next(trainer.model.parameters()).dtype is torch.bfloat16
        trainer.accelerator.close()
    assert json.loads(Path(folder, "model", "config.json").read_text("utf-8"))["dtype"] == "float32"
    return found


def test_bf16_has_fp32_masters(plain: tuple[str, Outcome], tmp_path: Path) -> None:
    for history, saved in run_ranks(RANKS, in_bf16, str(tmp_path), timeout=120.0):
        check((history, {}), (plain[1][0], {}), 0.05)
        # Values between two bf16 numbers can only come from the masters.
        assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.full
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with launched(), quiet():
        main = runpy.run_path(str(EXAMPLE))["main"]
        for given in ([], ["--steps", "42"]):  # as printed; the second run resumes the first one's checkpoint
            trainer = main(given)
            trainer.accelerator.close()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < 5.0  # less than log(256) = 5.5
    assert (tmp_path / "trainer_output" / "checkpoint-42" / "shardwise").is_dir()


# ---- saving fails


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def full_disk(trainer: Any, directory: str, **how: Any) -> None:
    """Replaces ``save_pretrained``: one of the files is truncated."""
    type(trainer.model).save_pretrained(trainer.model, directory, **how)
    os.truncate(Path(directory) / "model.safetensors", 100)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")


@on_ranks(RANKS, timeout=120.0)
def test_failed_saving_leaves_the_old_model(tmp_path: Path) -> None:
    """tests/ranks/checkpoint/test_output_files.py has other failures of writing."""
    path = tmp_path / "run"
    with launched(), quiet():
        trainer = make(str(path), zero(3), eval_strategy="no", max_steps=1)
        trainer.train()
        trainer.save_model()  # next to the checkpoints, the default place
        state = trainer.session.module.state_dict()
        trainer.session.module.load_state_dict({name: 2 * value for name, value in state.items()})
        before, number = content(path), path.stat().st_ino
        with mock.patch.object(trainer.model, "save_pretrained", functools.partial(full_disk, trainer)):
            raises(CheckpointError, r"rank 0 could not save the model to[\s\S]*ENOSPC", trainer.save_model)
        dist.barrier()
        assert content(path) == before
        dist.barrier()
        small = functools.partial(trainer.model.save_pretrained, max_shard_size="2KB")
        with mock.patch.object(trainer.model, "save_pretrained", small):
            for name in ("", "new"):
                trainer.save_model(str(path / name))
        trainer.accelerator.close()
    for name in ("", "new"):
        names = {file.name for file in (path / name).iterdir()}
        assert "model.safetensors" not in names and "model.safetensors.index.json" in names
        assert not any(each.startswith(".") for each in names)
        found = weights(str(path / name))
        assert_close(found, {key: 2 * state[key] for key in found}, 0.0, name)
    assert path.stat().st_ino == number and (path / "checkpoint-1" / "model.safetensors").is_file()


# ---- accelerate


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


@functools.cache
def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(30, 3, generator=generator)
    return list(zip(inputs, inputs.prod(1, keepdim=True), strict=True))


def parts(batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    return model, optimizer, DataLoader(points()[:24], batch), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def plain_loop() -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer, loader, schedule = parts(8)
    norms = []
    for _ in range(2):
        for index, (inputs, targets) in enumerate(loader):
            (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
            if index % 2 or index == len(loader) - 1:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
                for _ in range(RANKS):  # accelerate steps the scheduler once per process
                    schedule.step()
    return dict(model.state_dict()), norms


def loop(prepared: Any, epochs: int) -> list[float]:
    accelerator, model, optimizer, loader, schedule = prepared
    norms = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    of_groups = [param for group in optimizer.param_groups for param in group["params"]]
                    given = of_groups if len(norms) % 2 else model.parameters()
                    norms.append(float(accelerator.clip_grad_norm_(given, 0.1)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return norms


def start(plan: Plan, **options: Any) -> Any:
    from shardwise.huggingface import prepare

    return prepare(*parts(4), plan=plan, cpu=True, gradient_accumulation_steps=2, **options)


@on_ranks(RANKS, timeout=120.0)
@pytest.mark.parametrize("name", [*campaign("zero1"), "zero3"])
def test_accelerate_equals_a_plain_loop(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected, wanted = plain_loop()
    with launched(), quiet():
        prepared = start(PLANS[name])
        norms = loop(prepared, 1)
        prepared.accelerator.save_state(tmp_path / "state")
        norms += loop(prepared, 1)
        assert norms == pytest.approx(wanted, rel=RTOL) and max(wanted) > 0.1
        assert isinstance(prepared.accelerator.unwrap_model(prepared.model), nn.Sequential)
        again = start(PLANS["zero3"])
        again.accelerator.load_state(tmp_path / "state")
        loop(again, 1)
        for each in (prepared, again):
            state = each.accelerator.get_state_dict(each.model)
            assert_close(state, expected if dist.get_rank() == 0 else {}, RTOL, "accelerate")
        loader = again.accelerator.prepare(DataLoader(points()[:7], 2))
        gathered = [again.accelerator.gather_for_metrics(inputs).shape[0] for inputs, _ in loader]
        assert sum(gathered) == 7  # without the rows that were added to give the ranks equal shares
        again.accelerator.save_model(again.model, tmp_path / "model")
        dist.barrier()
        for each in (prepared, again):
            each.accelerator.close()
    assert_close(load_file(tmp_path / "model" / "model.safetensors"), expected, RTOL, "save_model")


@on_ranks(RANKS)
def test_unsupported_combinations_are_refused(tmp_path: Path) -> None:
    from shardwise.huggingface import ShardwiseAccelerator, ShardwiseTrainer

    folder = str(tmp_path)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def accelerator_of(plan: Any, **options: Any) -> Any:
        return ShardwiseAccelerator(plan=plan, cpu=True, **options)

    with launched(), warnings.catch_warnings(action="ignore"):
        generating = arguments(folder, 4)
        generating.use_vllm = True  # as TRL sets it
        accelerator, half, model = accelerator_of(zero(3)), accelerator_of(zero(3, torch.float16)), net()
        accelerator.prepare(first := net(), sgd(first))
        scaled, _ = half.prepare(model, sgd(model))
        beside = nn.Parameter(torch.ones(()))
        beside.grad = torch.ones(())
        other, third = sgd(net()), net()
        disk = HybridAdam(third.parameters(), nvme_offload_fraction=0.5, nvme_offload_dir=folder)
        assert_refused(
            (lambda: accelerator.prepare(other), "parameters of 0 of the 0"),
            (lambda: accelerator.prepare_optimizer(other), "SGD alone"),
            (lambda: accelerator.prepare(third, disk), "nvme_offload_fraction=0.5"),
            (lambda: half.clip_grad_norm_(list(scaled.parameters())[:1], 1.0), "1 of 6 parameters"),
            (lambda: half.clip_grad_value_([*scaled.parameters(), beside], 1.0), "6 of 6 parameters, 1 others"),
            (lambda: accelerator_of(zero(3).but(average="mean")), "average='mean'"),
            (lambda: accelerator_of(zero(3).but(tp=2)), "tp=2, pp=1, sp=1 is not available here"),
            (lambda: make(folder, zero(1).but(sp=2)), "tp=1, pp=1, sp=2 is not available here"),
            (lambda: accelerator_of(zero(3, torch.float16), mixed_precision="bf16"), "mixed_precision='bf16'"),
            (lambda: accelerator_of(zero(3), mixed_precision="fp8"), "'fp8'"),
            (lambda: make(folder, zero(3), auto_find_batch_size=True), "auto_find_batch_size"),
            (lambda: make(folder, zero(3).but(update="backward")), "update='backward'"),
            (lambda: make(folder, zero(3), save_on_each_node=True), "save_on_each_node"),
            (lambda: ShardwiseTrainer(model, generating, plan=zero(3)), "use_vllm=True with sharded parameters"),
            (lambda: accelerator_of("zero3"), "plan='zero3': give a Plan, such as"),
            (lambda: make(folder, None), "plan=None: give a Plan, such as"),  # type: ignore[arg-type]
        )
        accelerator.close()
        half.close()
