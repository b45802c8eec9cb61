"""Tests of memory traces.

- ``trace_memory`` on plain modules: bytes against formulas, all kinds of models, and everything restored afterwards.
- ``shardwise trace``: output files, text, and one-line errors.
- ``MemStats``: recording, files, and the arithmetic of budgets.
- ``draw``: valid SVG for any trace, with the right heights and escaped names.
"""

import copy
import itertools
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from shardwise.cli import main
from shardwise.cli.errors import BadInput
from shardwise.core.base.sizes import parse_size
from shardwise.core.memory.trace import picture
from shardwise.core.memory.trace.picture import draw, dump_memory_stats, stats_table, timeline_text
from shardwise.core.memory.trace.standalone import storage_bytes, trace_memory
from shardwise.core.memory.trace.stats import MemoryRecorder, MemStats, Moment, Phase, margin_bytes, model_budget_bytes
from tests.support.models import MODELS
from tests.support.on_ranks import raises
from tests.support.program_setup import python, surroundings

CPU = torch.device("cpu")
F32 = 4


def test_trace_of_an_mlp() -> None:
    rows, a, b, c = 8, 16, 32, 4
    model = nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, c))
    x = torch.ones(rows, a)
    stats = trace_memory(model, x, lambda m, t: m(t).sum(), capacity_bytes=10**6)
    parameters = (a * b + b + b * c + c) * F32
    weights = [a * b * F32, b * F32, b * c * F32, c * F32]
    batch, hidden, out = rows * a * F32, rows * b * F32, rows * c * F32
    forward = [m for m in stats.moments if m.phase == "forward"]
    assert [m.name for m in forward] == ["Sequential", "0", "1", "2", "loss"]
    assert [m.model_bytes for m in forward] == [parameters] * 5
    made = [batch, hidden, hidden, out, F32]
    assert [m.non_model_bytes for m in forward] == list(itertools.accumulate(made))
    backward = [(m.name, m.model_bytes) for m in stats.moments if m.phase == "backward"]
    names = [name for name, _ in backward]
    assert names[0] == "loss" and names.count("2") == names.count("0") == 3 and names.count("1") == 1
    grown = [later - before for (_, before), (_, later) in itertools.pairwise(backward) if later > before]
    assert sorted(grown) == sorted(weights) and backward[-1][1] == 2 * parameters
    assert stats.moments[-1].kinds == {"parameters": parameters, "gradients": parameters}
    assert stats.capacity_bytes == 10**6 and stats.device == "cpu"
    assert stats.gathered_bytes == {0: 0, 1: weights[0] + weights[1], 2: 0, 3: weights[2] + weights[3]}
    # At the end only the batch and the scalar loss remain in addition to model data.
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
    # A new optimizer is traced as in all steps but the first, which begins without state.
    assert not optimizer.state
    without, state_held = ([(m.name, m.kinds, m.non_model_bytes) for m in each.moments] for each in (stats, held))
    assert without == state_held and stats.peak_bytes == held.peak_bytes


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def value(x: Any) -> Any:
        return (id(x), x.clone()) if isinstance(x, Tensor) else copy.deepcopy(x)

    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {
        "parameters": {n: (*value(p.detach())[1:], id(p)) for n, p in model.named_parameters()},
        "buffers": {n: value(b) for n, b in model.named_buffers()},
        "grads": {n: p.grad if p.grad is None else value(p.grad) for n, p in model.named_parameters()},
        "hooks": [len(getattr(m, hooks)) for m in model.modules() for hooks in HOOKS],
        "parameter hooks": {n: len(p._post_accumulate_grad_hooks or ()) for n, p in model.named_parameters()},
        "random": (torch.get_rng_state(), random.getstate()),
        "modes": torch._C._len_torch_dispatch_stack(),
        "state": {id(p): {k: value(v) for k, v in s.items()} for p, s in optimizer.state.items()},
        "groups": groups,
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
def test_all_kinds_of_models(name: str) -> None:
    case = MODELS[name]
    model, batch = case.factory(), case.batch(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = _snapshot(model, optimizer)
    stats = trace_memory(model, batch, case.loss, optimizer=optimizer)
    assert _same(before, _snapshot(model, optimizer))
    assert {m.phase for m in stats.moments} == {"forward", "backward", "step"}
    assert all(m.non_model_bytes >= 0 and sum(m.kinds.values()) == m.model_bytes for m in stats.moments)
    assert stats.moments[0].kinds["parameters"] == storage_bytes(model.parameters(), CPU)
    # Compare with the same step without a tracer.
    case.loss(model, batch).backward()
    gradients = storage_bytes((p.grad for p in model.parameters()), CPU)
    assert stats.moments[-1].kinds["gradients"] == gradients
    assert MemStats.from_json(stats.to_json()) == stats
    again = trace_memory(model, batch, case.loss, optimizer=optimizer)
    assert [m.name for m in again.moments] == [m.name for m in stats.moments]


class Busy(nn.Module):
    """A module whose forward pass changes buffers, random numbers and attributes."""

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
def test_everything_is_restored(fails: str) -> None:
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

    def step(*_: Any) -> None:
        raise RuntimeError(f"no step of {optimizer.param_groups[0]['lr']}")

    if fails == "step":
        optimizer.register_step_post_hook(step)
    before = _snapshot(model, optimizer)
    with pytest.raises((RuntimeError, ZeroDivisionError)) if fails else nullcontext():
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


def test_outputs_and_batches() -> None:
    x = torch.ones(2, 4)
    outputs: list[Callable[[Tensor], Any]] = [
        lambda y: y,
        lambda y: (y, [y * 2], {"a": y}),
        lambda y: {"loss": y.sum()},
        lambda y: Output(y, y.sum()),
        lambda y: Output(y),
        lambda y: {"loss": None, "logits": y, "ids": torch.arange(3)},
    ]
    for wrap, batch in itertools.product(outputs, (x, (x, 2.0), {"x": x, "scale": 2.0})):
        stats = trace_memory(Returns(wrap), batch)
        assert stats.moments[-1].kinds["gradients"] == 20 * F32 and stats.moments[0].non_model_bytes == x.nbytes


def test_invalid_arguments() -> None:
    x = torch.ones(2, 4)
    raises(TypeError, "no floating tensor", lambda: trace_memory(Returns(lambda y: y.argmax()), x))
    raises(TypeError, r"loss gave 3\.0, a float", lambda: trace_memory(Returns(lambda y: y), x, lambda m, b: 3.0))
    raises(ValueError, r"loss has the shape \(2, 4\)", lambda: trace_memory(Returns(lambda y: y), x, lambda m, b: m(b)))
    raises(ValueError, r"0\.weight is not initialized", lambda: trace_memory(nn.Sequential(nn.LazyLinear(3)), x))


def test_meta_device() -> None:
    def traced(device: str) -> MemStats:
        masked = Returns(lambda y: y if (y < 9).all() else None)  # without values, a mask is taken as set
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), masked).to(device)
        return trace_memory(model, torch.ones(4, 8).to(device), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    real, planned = ([(m.name, m.total_bytes) for m in traced(device).moments] for device in ("cpu", "meta"))
    assert real == planned


MODELS_FILE = """
import torch
from torch import nn
import beside_it

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.ones(2, 4), lambda m, x: m(x).sum()

def tied():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = (a, b)[torch.zeros(1).int().item()].weight  # a value, which the meta device does not have
    return nn.Sequential(a, b), torch.ones(2, 4)

def huge(): return nn.Linear(1 << 20, 1 << 20), torch.ones(1, 1 << 20)
def model_only(): return nn.Linear(4, 4)
def fixed(): return model_only().requires_grad_(False), torch.ones(1, 4)
def wrong(): return "a model"
def needs(size): return size
def raises(): raise KeyError("no such layer")
def shapes(): return model_only(), torch.ones(1, 7)
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
    options = main._parser().parse_args(["trace", *arguments])
    return int(options.main(options))


def test_output_files_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    raises(SystemExit, "2", run, "traced_models.py:build", "--capacity", "3apples")
    assert "--capacity: '3apples' is not a size" in capsys.readouterr().err


def test_model_is_built_on_the_meta_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, device in (("tied", "cpu"), ("tied", "meta"), ("huge", "meta")):
        assert run(f"traced_models.py:{name}", "--device", device, "--quiet") == 0
    real, planned, huge = capsys.readouterr().out.splitlines()
    assert real == planned and huge.startswith("peak 8 TiB at Linear (backward), 4 TiB activations and the rest; ")


def test_command_errors_are_one_line(folder: Path) -> None:
    for arguments, message in (
        ("", "neither of"),
        ("traced_models.py:build --stats old.json", "both of"),
        ("traced_models.py:", "give FILE_OR_MODULE:FUNCTION"),
        ("nowhere.py:build", "nowhere.py: no such file"),
        ("broken_models.py:build", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("traced_models.py:builds", "no such function; it has build, fixed"),
        ("traced_models.py:needs", "needs arguments (size)"),
        ("traced_models.py:raises", "raised KeyError: 'no such layer'"),
        ("traced_models.py:wrong", "returned str"),
        ("traced_models.py:model_only", "returned no batch"),
        ("traced_models.py:shapes", "the step of traced_models.py:shapes raised RuntimeError: mat1 and mat2"),
        ("traced_models.py:build --device warp", "--device warp: no such device; give cpu, cuda"),
        ("traced_models.py:build --optimizer Optimizer", "--optimizer Optimizer"),
        ("traced_models.py:fixed --optimizer SGD", "no parameter that needs a gradient"),
        ("traced_models.py:build --json .", ".: cannot be written"),
        (f"traced_models.py:build --out {'x' * 300}", f"{'x' * 300}: cannot be written: File name too long"),
        ("--stats old.json", "--stats old.json: a memory trace of version 0"),
        ("--stats old.json --device cpu", "--device cpu: has no meaning with --stats"),
    ):
        caught = raises(BadInput, None, run, *arguments.split())
        assert message in caught and "\n" not in caught
        assert not (folder / "trace.svg").exists()


def test_saved_trace_needs_no_torch(folder: Path) -> None:
    MemStats([], "cpu").save(folder / "s.json")
    code = "import sys\nfrom shardwise.cli.main import main\nmain(sys.argv[1:])\nsys.exit('torch' in sys.modules)"
    arguments = ("-c", code, "trace", "--stats", "s.json")
    done = python(*arguments, cwd=folder, env=surroundings(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0, done.stderr
    assert "# model data" in done.stdout  # ASCII letters on terminals without other characters


def moment(unit: int, non_model: int, model: int = 0, phase: Phase = "forward", name: str = "m") -> Moment:
    return Moment(unit, name, phase, model, non_model)


class Peaks:
    """A tracker that returns a given peak."""

    def __init__(self) -> None:
        self.next = 0

    def take_peak(self) -> int:
        return self.next


def test_peaks_belong_to_the_previous_moment() -> None:
    peaks = Peaks()
    recorder = MemoryRecorder(peaks, device="cpu", capacity_bytes=1000, gathered_bytes={0: 10})
    for step in range(2):
        peaks.next = 7
        recorder.moment(0, "a", "forward", 100, {"parameters": 60})
        peaks.next = 30
        recorder.end_interval()
        peaks.next = 20
        recorder.moment(1, "b", "backward", 200)
        peaks.next = 40 + step
        recorder.moment(-1, "c", "step", 50)
        peaks.next = 5
        stats = recorder.finish()
        assert [m.non_model_bytes for m in stats.moments] == [30, 40 + step, 5]
        assert [m.model_bytes for m in stats.moments] == [100, 200, 50]
        assert stats.moments[0].kinds == {"parameters": 60} and stats.capacity_bytes == 1000
        assert (stats.peak_bytes, stats.peak_model_bytes, stats.peak_non_model_bytes) == (240 + step, 200, 40 + step)
        assert stats.peak_index == 1


STATS = MemStats(
    moments=[
        moment(3, 10),
        moment(1, 50),
        moment(1, 90),  # the same unit again counts as one use
        moment(-1, 60),  # no unit: part of the previous use
        moment(2, 30, phase="backward"),
        moment(1, 80, 500, phase="backward"),
        moment(-1, 5000, phase="step"),  # the step has no gathers, so its peak is ignored
    ],
    device="cpu",
)


def test_positions_count_uses_of_units() -> None:
    assert STATS.order == (3, 1, 2, 1) and STATS.interval_bytes == (10, 90, 30, 80)
    assert STATS.matches([3, 1, 1, 2, 1]) and not STATS.matches([3, 1, 2]) and not STATS.matches([3, 2, 1, 1])


def budget(stats: MemStats | None, position: int, capacity: int = 1000, steady: float = 0.9) -> int:
    ratios = {"warmup_non_model_ratio": 0.8, "steady_capacity_ratio": steady}
    return model_budget_bytes(stats, position, capacity_bytes=capacity, **ratios)


def test_budgets() -> None:
    assert budget(None, 0) == budget(None, 99) == 1000 - 800 + (math.floor(1000 * (1 - 0.8)) - 200)
    assert [budget(STATS, i) for i in range(4)] == [890, 810, 870, 820]
    assert budget(STATS, -1) == budget(STATS, 4) == 810  # unknown position: the largest interval
    assert budget(STATS, 0, capacity=11) == 0 and budget(STATS, 3, capacity=80) == 0
    assert budget(MemStats([], "cpu"), 0) == 900


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf])
def test_invalid_ratios(ratio: float) -> None:
    raises(ValueError, f"steady_capacity_ratio={ratio}", lambda: budget(STATS, 0, steady=ratio))
    raises(ValueError, f"margin_ratio={ratio}", margin, ratio)
    raises(ValueError, "capacity_bytes=-1", lambda: budget(STATS, 0, capacity=-1))


def margin(ratio: float, stats: MemStats | None = None, **given: Any) -> int:
    given = {"capacity_bytes": 10000, "steady_capacity_ratio": 0.9, **given}
    return margin_bytes(stats or STATS, margin_ratio=ratio, **given)


def test_margin_is_a_fraction_of_the_smallest_remainder() -> None:
    assert margin(1.0) == 9000 - 5000 and margin(0.25) == 1000 and margin(0.0) == 0
    assert margin(1.0, needed_bytes=600) == 9000 - 5000 - 600 and margin(1.0, needed_bytes=9000) == 0
    small = MemStats(STATS.moments[:6], "cpu")
    assert margin(0.5, small, capacity_bytes=1000, steady_capacity_ratio=1) == (1000 - 580) // 2


def test_json_round_trip(tmp_path: Path) -> None:
    rng = random.Random(1)
    name = 'layer "ä"\n<0>'
    moments = [Moment(i - 1, name, "backward", 2**60 + i, rng.randrange(2**55), {"gradients": i}) for i in range(50)]
    stats = MemStats(moments, "cuda:0", 2**40, {7: 3, 0: 2**62})
    for each in (stats, STATS):  # the second file replaces the first
        each.save(tmp_path / "s.json")
        assert MemStats.load(tmp_path / "s.json") == each and os.listdir(tmp_path) == ["s.json"]
    raises(FileNotFoundError, None, lambda: STATS.save(tmp_path / "nowhere" / "s.json"))


def _changed(**changes: Any) -> str:
    return json.dumps(json.loads(STATS.to_json()) | changes)


ROW = [0, "a", "forward", 1, 2, {}]


def test_invalid_files(tmp_path: Path) -> None:
    for text, message in (
        ("", "no JSON"),
        (_changed(version=2), "version 2"),
        (_changed(device=None), "device is None"),
        (_changed(capacity_bytes=-1), "capacity_bytes is -1"),
        (_changed(capacity_bytes=10**400), r"capacity_bytes is 2\*\*1328 and more, not a whole number from 0 to"),
        ("[" * 100_000, r"\['\.\.\. nests too deeply"),
        (_changed(moments=[ROW, ROW[:5]]), r"moments\[1\]"),
        (_changed(moments=[[-2, *ROW[1:]]]), r"moments\[0\]: unit is -2"),
        (_changed(moments=[[0, "a", "sideways", 1, 2, {}]]), "phase 'sideways'"),
        (_changed(moments=[[0, "a", "step", 1, -2, {}]]), "non_model_bytes is -2"),
    ):
        (tmp_path / "bad.json").write_text(text)
        raises(ValueError, rf"bad\.json.*{message}", MemStats.load, tmp_path / "bad.json")


SIZES = {"1": 1, "64MiB": 64 << 20, "24GB": 24 * 10**9, "1.5GiB": 3 << 29, " 2 kib ": 2048, "8tib": 8 << 40}
SIZES |= {".5KB": 500, "9007199254740993": 9007199254740993, "10B": 10}


def test_sizes() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES
    for text in ("", "MiB", "-1", "1e9", "nan", "12XB", "1 2", "0", "0.1B", "1,5GiB"):
        raises(ValueError, repr(text), parse_size, text)


SVG = "{http://www.w3.org/2000/svg}"


def make(count: int, capacity: int | None = None) -> MemStats:
    rng = random.Random(count)
    moments = []
    for i in range(count):
        phase: Phase = "forward" if i < count * 0.4 else "backward" if i < count * 0.95 else "step"
        model = rng.randrange(1 << 28)
        moments.append(Moment(i, f"layers.{i}", phase, model, rng.randrange(1 << 30), {"parameters": model // 2}))
    return MemStats(moments, "cpu", capacity)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 499, 1001, 5000])
@pytest.mark.parametrize("capacity", [None, 0, 1 << 20, 1 << 30, 1 << 50])
def test_svg_is_valid_and_bounded_in_size(count: int, capacity: int | None) -> None:
    stats = make(count, capacity)
    text = draw(stats)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and "nan" not in text and "inf" not in text
    assert len(text) < 300_000
    for x in re.findall(r" x='(-?[0-9.]+)'", text):
        assert 0 <= float(x) <= picture.WIDTH
    shown = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    if count:
        peak = stats.moments[stats.peak_index]
        assert f"at {peak.name} ({peak.phase})" in shown
    else:
        assert "no moments" in shown
    drawn = any(t.text and t.text.startswith("capacity") for t in root.iter(f"{SVG}text"))
    assert drawn == (capacity is not None and 0 < capacity <= 2 * max(stats.peak_bytes, 1))


def test_svg_heights_match_the_bytes() -> None:
    """The top of each kind's area is converted back from the path's coordinates to bytes."""
    moments = [
        Moment(0, "a", "forward", 100, 50, {"parameters": 100}),
        Moment(1, "b", "forward", 300, 500, {"parameters": 100, "gradients": 150}),
        Moment(0, "a", "backward", 250, 0, {"parameters": 100, "gradients": 150}),
    ]
    root = ElementTree.fromstring(draw(MemStats(moments, "cpu", 1000)))
    top = 1000 * 1.06
    heights: dict[str, list[int]] = {}
    for path in root.iter(f"{SVG}path"):
        points = [tuple(map(float, p.split())) for p in re.findall(r"[-0-9.]+ [-0-9.]+", path.get("d") or "")]
        base = picture.HEIGHT - picture.BOTTOM
        sizes = [round((base - y) / (base - picture.TOP) * top) for _, y in points[: len(points) // 2 : 2]]
        heights[path.get("fill") or ""] = sizes
    for kind, expected in (
        ("parameters", [100, 100, 100]),
        ("gradients", [100, 250, 250]),
        (picture.MODEL, [100, 300, 250]),  # model data without a kind
        (picture.NON_MODEL, [150, 800, 250]),
    ):
        assert heights[picture.color_of(kind, [])] == pytest.approx(expected, abs=2)


EVIL = "</text><script>alert('x')</script>&\"\x00\x1b[31m\n" + "long" * 50


def test_names_are_escaped() -> None:
    stats = MemStats([Moment(0, EVIL, "forward", 5, 5, {EVIL: 3})], EVIL)
    for text in (draw(stats, EVIL), picture.draw_tiers({EVIL: {EVIL: 5}}, {EVIL: 3}, EVIL)):
        root = ElementTree.fromstring(text)
        assert not list(root.iter(f"{SVG}script")) and "\x1b" not in text and "\x00" not in text
    for text in (timeline_text(stats), picture.tiers_text({EVIL: {EVIL: 5}}, {}), stats_table(stats)):
        assert "\x1b" not in text and "\x00" not in text
    assert max(map(len, lines := timeline_text(stats, 40).splitlines())) == 40 and len(lines) == 2


def test_text_table(tmp_path: Path) -> None:
    stats = make(40, 1 << 31)
    dump_memory_stats(stats, tmp_path / "s.txt")
    text = (tmp_path / "s.txt").read_text()
    peak = stats.moments[stats.peak_index]
    assert f"{stats.peak_bytes} bytes" in text and f"(moment {stats.peak_index}, {peak.name}, {peak.phase})" in text
    rows = text.split("name\n", 1)[1].splitlines()
    assert len(rows) == 40
    for row, m in zip(rows, stats.moments, strict=True):
        assert row.split()[1:] == [str(m.unit), m.phase, str(m.model_bytes), str(m.non_model_bytes), m.name]
    assert "no known limit" in stats_table(make(0))
