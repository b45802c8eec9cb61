"""Metrics: the records of steps, and their writers."""

import csv
import json
import math
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest
import torch
from front_ends import FRONT_ENDS, HIDDEN, OUT, ROWS, STEPS, Net, Program, loss_of, own_batches
from torch import nn

from shardwise import metrics
from shardwise.lightning import MetricsCallback
from shardwise.metrics import Metrics, csv_file, json_lines
from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import run_ranks
from tests.support.engine_setup import scaler, sharded
from tests.support.on_ranks import on_ranks, raises

BATCH, WIDTH, TOKENS = 3, 4, 60
FLOPS = 5 * 2 * BATCH * WIDTH * WIDTH
"""Two layers: outputs, gradients of the weights, and the gradient of the second layer's input."""


def records(plan: Plan, folder: Path, every: int) -> list[dict[str, float]]:
    """Return the records of four steps; the second one overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
    writers = csv_file(folder / "metrics.csv"), json_lines(folder / "metrics.jsonl")
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.5), plan) as session:
        made = Metrics(session, *writers, every=every, peak_flops=1e6)
        found = []
        for step in range(4):
            x = torch.full((BATCH, WIDTH), math.inf if step == 1 else 1.0)
            with made.count_flops():
                loss = session.module(x).float().square().mean()
                session.backward(loss)
            session.optimizer.step()
            found.append(made.step(loss, TOKENS))
            norm = session.optimizer.get_grad_norm()
            assert made.flops == FLOPS and str(found[-1].get("grad_norm", norm)) == str(norm)
    return found


def test_records_of_steps(tmp_path: Path) -> None:
    plan = zero(2, torch.float16).but(scaler=scaler())
    found = run_ranks(2, records, plan, tmp_path, 1)[0]
    assert [each["skipped_steps"] for each in found] == [0, 1, 1, 1]
    assert [each["loss_scale"] for each in found] == [1024.0, 512.0, 512.0, 512.0]
    for each in found:
        assert each["mfu"] * 1e6 * TOKENS / each["tokens_per_second"] == pytest.approx(FLOPS) and each["lr"] == 0.5
        assert each["device_bytes"] > each["disk_bytes"] == each["host_bytes"] == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    finite = [{name: value if math.isfinite(value) else None for name, value in each.items()} for each in found]
    assert rows == [{"step": step, **each} for step, each in enumerate(finite, 1)] and rows[1]["loss"] is None
    table = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in table] == ["1", "2", "3", "4"] and float(table[3]["loss"]) == found[3]["loss"]


def test_records_between_steps(tmp_path: Path) -> None:
    raises(ValueError, "session=None has no sharded optimizer", Metrics, None)
    (found,) = run_ranks(1, records, zero(3), tmp_path, 2)
    assert [bool(each) for each in found] == [False, True, False, True]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 2


SESSIONS: dict[str, Callable[[Any], Session]] = {
    "booster-gemini": lambda front_end: front_end.booster.plugin.session(front_end.module),
    "deepspeed": lambda front_end: front_end.module.session,
    "fabric": lambda front_end: front_end.fabric.strategy.session,
    "huggingface": lambda front_end: front_end.trainer.session,
}


@on_ranks(2)
@pytest.mark.parametrize("name", SESSIONS)
def test_records_under_a_front_end(name: str, tmp_path: Path) -> None:
    kind, program = FRONT_ENDS[name], Program(clip=0.05)
    with kind.context(), warnings.catch_warnings(action="ignore"):
        front_end = kind(program, str(tmp_path))
        front_end.run()
        found = Metrics(SESSIONS[name](front_end), json_lines(tmp_path / "new" / "metrics.jsonl")).step(0.5, TOKENS)
        front_end.close()
    assert found["lr"] == 0.05 and found["grad_norm"] > 0.99 * program.clip and found["skipped_steps"] == 0


@on_ranks(2)
def test_lightning_callback_records_steps_of_several_batches() -> None:
    rows: list[tuple[int, dict[str, float]]] = []
    front_end = FRONT_ENDS["lightning-deepspeed"](Program(passes=2, clip=0.05), "")
    front_end.trainer.callbacks.append(MetricsCallback(lambda *row: rows.append(row), peak_flops=1e6, tokens=len))
    with warnings.catch_warnings(action="ignore"):
        front_end.run()
        front_end.close()
    flops = 2 * 2 * (ROWS // 2) * (2 * 6 * HIDDEN + 3 * HIDDEN * OUT)
    assert len(rows) == STEPS * front_end.trainer.is_global_zero
    for step, row in rows:
        losses = [float(loss_of(Net()(inputs), target)) for inputs, target in own_batches(0, 2)]
        assert step > 1 or row["loss"] == pytest.approx(sum(losses) / 2)
        assert row["tokens_per_second"] * flops / row["mfu"] / 1e6 == pytest.approx(2 * 2 * 2) and row["lr"] == 0.05


@on_ranks(1)
def test_lightning_callback_goes_on_after_skipped_batches_and_several_updates() -> None:
    record, model = MetricsCallback(write := MagicMock(), peak_flops=1.0), nn.Linear(2, 2)
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.5), zero(1)) as session:
        trainer = MagicMock(**{"strategy.session": session}, global_step=0)
        record.on_train_start(trainer, None)
        record.on_train_batch_start(trainer, None, None, 0)  # a hook of the module skips this batch
        record.on_train_batch_start(trainer, None, None, 1)
        session.module(torch.ones(1, 2))
        trainer.global_step = 2  # manual optimization with two optimizers
        record.on_train_batch_end(trainer, None, None, None, 1)
    assert write.call_args[0][0] == 2 and math.isnan(write.call_args[0][1]["loss"]) and record.metrics.flops == 8


VALUES = {"loss": 0.5, "lr": 1e-3}
SCALARS = [*(call.SummaryWriter().add_scalar(*each, 8) for each in VALUES.items()), call.SummaryWriter().flush()]
CALLS = {
    "tensorboard": (["runs"], {}, [call.SummaryWriter(log_dir="runs"), *SCALARS]),
    "wandb": ([], {"project": "p"}, [call.init(project="p"), call.init().log(VALUES, step=8)]),
    "mlflow": ([], {"tags": "t"}, [call.start_run(tags="t"), call.log_metrics(VALUES, 8, run_id=ANY)]),
}


@pytest.mark.parametrize("package", CALLS)
def test_packages_are_opened_at_the_first_write(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, options, expected = CALLS[package]
    with monkeypatch.context() as without:
        without.setattr(metrics, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match=rf"{package}\(\) needs .*pip install {package}"):
            getattr(metrics, package)(*args, **options)
    module = MagicMock(__spec__=ModuleSpec(package, None))
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    write = getattr(metrics, package)(*args, **options)
    assert module.mock_calls == []
    write(8, VALUES)
    assert module.mock_calls == expected
    write(9, {})
    assert sum(each[0] == expected[0][0] for each in module.mock_calls) == 1
