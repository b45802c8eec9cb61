"""trace_memory on plain modules: numbers against formulas, every kind of model, and everything put back afterwards.

``shardwise trace``: what it writes and prints, and one line for everything that is wrong.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from program_setup import python, surroundings
from torch import Tensor, nn

from shardwise.cli import trace
from shardwise.cli.errors import BadInput
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.memory.trace.tracing import storage_bytes, trace_memory
from tests.support.models import MODELS

CPU = torch.device("cpu")
F32 = 4


def test_an_mlp_by_hand() -> None:
    rows, a, b, c = 8, 16, 32, 4
    model = nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, c))
    x = torch.ones(rows, a)
    stats = trace_memory(model, x, lambda m, t: m(t).sum(), capacity_bytes=10**6)
    parameters = (a * b + b + b * c + c) * F32
    weights = [a * b * F32, b * F32, b * c * F32, c * F32]
    batch, hidden, out = rows * a * F32, rows * b * F32, rows * c * F32
    forward = [(m.name, m.model_bytes, m.non_model_bytes) for m in stats.moments if m.phase == "forward"]
    assert forward == [
        ("Sequential", parameters, batch),
        ("0", parameters, batch + hidden),
        ("1", parameters, batch + 2 * hidden),
        ("2", parameters, batch + 2 * hidden + out),
        ("loss", parameters, batch + 2 * hidden + out + F32),
    ]
    backward = [(m.name, m.model_bytes) for m in stats.moments if m.phase == "backward"]
    names = [name for name, _ in backward]
    assert names[0] == "loss" and names.count("2") == names.count("0") == 3 and names.count("1") == 1
    grown = [later - before for (_, before), (_, later) in pairwise(backward) if later > before]
    assert sorted(grown) == sorted(weights) and backward[-1][1] == 2 * parameters
    assert stats.moments[-1].kinds == {"parameters": parameters, "gradients": parameters}
    assert stats.capacity_bytes == 10**6 and stats.device == "cpu"
    assert stats.gathered_bytes == {0: 0, 1: weights[0] + weights[1], 2: 0, 3: weights[2] + weights[3]}
    # At the end only the batch and the scalar loss are left besides model data.
    assert stats.moments[-1].non_model_bytes <= batch + F32 + hidden + weights[0]


def test_optimizer_state_is_model_data() -> None:
    model = nn.Linear(100, 50)
    x = torch.ones(3, 100)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    stats = trace_memory(model, x, optimizer=optimizer)
    parameters = (100 * 50 + 50) * F32
    step, after = stats.moments[-2:]
    assert (step.name, step.phase, after.phase) == ("optimizer step", "step", "step")
    state = 2 * parameters + 2 * F32  # two moments, and a step count for each parameter
    for each in (step, after):
        assert each.kinds == {"parameters": parameters, "gradients": parameters, "optimizer state": state}
        assert each.model_bytes == 2 * parameters + state
    assert 0 < step.non_model_bytes <= 3 * 100 * F32 + 3 * parameters and after.non_model_bytes < 2000
    again = torch.optim.AdamW(model.parameters(), foreach=False)
    model(x).sum().backward()
    again.step()
    held = trace_memory(model, x, optimizer=again)
    assert held.moments[0].kinds["optimizer state"] == state == held.moments[-1].kinds["optimizer state"]
    # With a new optimizer it is not that of the first step, which begins without state, but of all others.
    assert not optimizer.state
    assert [(m.name, m.kinds, m.non_model_bytes) for m in stats.moments] == [
        (m.name, m.kinds, m.non_model_bytes) for m in held.moments
    ]
    assert stats.peak_bytes == held.peak_bytes


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    def value(x: Any) -> Any:
        return (id(x), x.clone()) if isinstance(x, Tensor) else copy.deepcopy(x)

    state = None
    if optimizer is not None:
        state = {id(p): {k: value(v) for k, v in s.items()} for p, s in optimizer.state.items()}
        groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        state = (state, groups)
    return {
        "parameters": {n: (*value(p.detach())[1:], id(p)) for n, p in model.named_parameters()},
        "buffers": {n: value(b) for n, b in model.named_buffers()},
        "grads": {n: p.grad if p.grad is None else value(p.grad) for n, p in model.named_parameters()},
        "hooks": {
            n: [len(getattr(m, h)) for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
            for n, m in model.named_modules()
        },
        "parameter hooks": {n: len(p._post_accumulate_grad_hooks or ()) for n, p in model.named_parameters()},
        "random": (torch.get_rng_state(), random.getstate()),
        "modes": torch._C._len_torch_dispatch_stack(),
        "state": state,
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return bool(isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_odd_models(name: str) -> None:
    case = MODELS[name]
    model, batch = case.factory(), case.batch(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = _snapshot(model, optimizer)
    stats = trace_memory(model, batch, case.loss, optimizer=optimizer)
    assert _same(before, _snapshot(model, optimizer))
    assert {m.phase for m in stats.moments} == {"forward", "backward", "step"}
    assert all(m.non_model_bytes >= 0 and sum(m.kinds.values()) == m.model_bytes for m in stats.moments)
    assert stats.moments[0].kinds["parameters"] == storage_bytes(model.parameters(), CPU)
    # The same step without a tracer.
    case.loss(model, batch).backward()
    gradients = storage_bytes((p.grad for p in model.parameters()), CPU)
    assert stats.moments[-1].kinds["gradients"] == gradients
    assert MemStats.from_json(stats.to_json()) == stats
    again = trace_memory(model, batch, case.loss, optimizer=optimizer)
    assert [m.name for m in again.moments] == [m.name for m in stats.moments]


class Busy(nn.Module):
    """Changes whatever a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", None)
        self.register_buffer("seen", torch.zeros(6))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen = x.detach().mean(0)
        random.random()
        x = nn.functional.dropout(self.linear(self.norm(x)))
        if self.fails:
            raise RuntimeError(f"no more of {tuple(x.shape)}")
        return x


@pytest.mark.parametrize("fails", ["", "forward", "loss", "backward", "step"])
def test_everything_is_put_back(fails: str) -> None:
    model, x = Busy(), torch.ones(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    model.norm.weight.grad = None
    model.fails = fails == "forward"

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        value = module(batch).sum()
        if fails == "loss":
            raise RuntimeError(f"no loss of {value}")
        if fails == "backward":
            value.register_hook(lambda gradient: 1 / 0)
        return value

    def step(*arguments: Any) -> None:
        del arguments
        raise RuntimeError(f"no step of {optimizer.param_groups[0]['lr']}")

    if fails == "step":
        optimizer.register_step_post_hook(step)
    before = _snapshot(model, optimizer)
    if fails:
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            trace_memory(model, x, loss, optimizer=optimizer)
    else:
        trace_memory(model, x, loss, optimizer=optimizer)
    assert _same(before, _snapshot(model, optimizer))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.wrap(self.linear(x) * scale)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: (y, [y * 2], {"a": y}),
        lambda y: {"loss": y.sum()},
        lambda y: Output(y, y.sum()),
        lambda y: Output(y),
        lambda y: {"loss": None, "logits": y, "ids": torch.arange(3)},
    ],
)
@pytest.mark.parametrize("batch", ["tensor", "tuple", "dict"])
def test_outputs_and_batches(wrap: Callable[[Tensor], Any], batch: str) -> None:
    x = torch.ones(2, 4)
    given = {"tensor": x, "tuple": (x, 2.0), "dict": {"x": x, "scale": 2.0}}[batch]
    stats = trace_memory(Returns(wrap), given)
    assert stats.moments[-1].kinds["gradients"] == 20 * F32
    assert stats.moments[0].non_model_bytes == x.nbytes


def test_wrong_uses_are_named() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match="no floating tensor"):
        trace_memory(Returns(lambda y: y.argmax()), x)
    with pytest.raises(TypeError, match=r"loss gave 3\.0, a float"):
        trace_memory(Returns(lambda y: y), x, lambda m, b: 3.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"loss has the shape \(2, 4\)"):
        trace_memory(Returns(lambda y: y), x, lambda m, b: m(b))
    with pytest.raises(ValueError, match=r"0\.weight is not initialised"):
        trace_memory(nn.Sequential(nn.LazyLinear(3)), x)


def test_on_the_meta_device() -> None:
    def traced(device: str) -> MemStats:
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
        return trace_memory(model, torch.ones(4, 8).to(device), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    real, planned = traced("cpu"), traced("meta")
    assert [(m.name, m.total_bytes) for m in real.moments] == [(m.name, m.total_bytes) for m in planned.moments]


MODELS_FILE = """
import torch
from torch import nn
import beside_it

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.ones(2, 4), lambda m, x: m(x).sum()

def model_only():
    return nn.Linear(4, 4)

def batch():
    return {"input": torch.ones(3, 4)}

def fixed():
    return model_only().requires_grad_(False), torch.ones(1, 4)

def four():
    return 1, 2, 3, 4

def wrong():
    return "a model"

def bad_loss():
    return model_only(), torch.ones(1, 4), 5

def needs(size):
    return size

def raises():
    raise KeyError("no such layer")

def shapes():
    return model_only(), torch.ones(1, 7)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "traced_models.py").write_text(MODELS_FILE)
    (tmp_path / "beside_it.py").write_text("")
    (tmp_path / "broken_models.py").write_text("import nothing_like_this\n")
    (tmp_path / "old.json").write_text('{"format": "shardwise.memstats", "version": 0}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("RANK", raising=False)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    trace.add_parser(parser.add_subparsers())
    options = parser.parse_args(["trace", *arguments])
    return int(options.main(options))


def test_files_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", "p.svg", "--json", "s.json", "--dump", "s.txt", "--capacity", "1KiB", "--optimizer", "SGD"]
    assert run("traced_models.py:build", *arguments) == 0
    shown = capsys.readouterr().out
    stats = MemStats.load(folder / "s.json")
    assert "backward" in shown and "of 1 KiB" in shown and shown.endswith("picture in p.svg\n")
    assert stats.capacity_bytes == 1024 and {m.phase for m in stats.moments} == {"forward", "backward", "step"}
    text = (folder / "p.svg").read_text()
    assert ElementTree.fromstring(text) is not None and "traced_models.py:build" in text
    assert str(stats.peak_bytes) in (folder / "s.txt").read_text()

    assert run("--stats", "s.json", "--quiet", "--capacity", "1GiB", "--out", "q.svg") == 0
    assert capsys.readouterr().out.count("\n") == 1 and "capacity 1 GiB" in (folder / "q.svg").read_text()


BAD = [
    ("", "neither of"),
    ("traced_models.py:build --stats old.json", "both of"),
    ("traced_models.py:", "give FILE_OR_MODULE:FUNCTION"),
    ("nowhere.py:build", "nowhere.py: no such file"),
    ("broken_models.py:build", "ModuleNotFoundError: No module named 'nothing_like_this'"),
    ("traced_models.py:builds", "no such function; there is bad_loss, batch, build, fixed"),
    ("traced_models.py:needs", "needs arguments (size)"),
    ("traced_models.py:raises", "raised KeyError: 'no such layer'"),
    ("traced_models.py:wrong", "returned str"),
    ("traced_models.py:model_only", "returned no batch"),
    ("traced_models.py:shapes", "the step of traced_models.py:shapes raised RuntimeError: mat1 and mat2"),
    ("traced_models.py:build --capacity 3apples", "--capacity: '3apples' is not a size"),
    ("traced_models.py:build --device warp", "--device warp: no such device; give cpu, cuda"),
    ("traced_models.py:build --optimizer Optimizer", "--optimizer Optimizer"),
    ("traced_models.py:fixed --optimizer SGD", "no parameter that needs a gradient"),
    ("traced_models.py:build --json .", ".: cannot be written"),
    (f"traced_models.py:build --out {'x' * 300}", f"{'x' * 300}: cannot be written: File name too long"),
    ("--stats old.json", "--stats old.json: a memory trace of version 0"),
    ("--stats old.json --device cpu", "--device cpu: has no meaning with --stats"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(folder: Path, arguments: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        run(*arguments.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (folder / "trace.svg").exists()


def test_help_and_a_saved_trace_need_no_torch(folder: Path) -> None:
    MemStats([], "cpu").save(folder / "s.json")
    code = (
        "import argparse, sys\nfrom shardwise.cli import trace\nparser = argparse.ArgumentParser()\n"
        "trace.add_parser(parser.add_subparsers())\noptions = parser.parse_args(['trace', '--stats', 's.json'])\n"
        "options.main(options)\nsys.exit('torch' in sys.modules)"
    )
    done = python("-c", code, cwd=folder, env=surroundings(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0, done.stderr
    assert "# model data" in done.stdout  # plain letters where the terminal has no others
