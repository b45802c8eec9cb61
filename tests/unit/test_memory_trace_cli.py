"""``shardwise trace``: what it writes and prints, and one line for everything that is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from program_setup import python, surroundings

from shardwise.cli import trace
from shardwise.cli.errors import BadInput
from shardwise.core.memory.trace.stats import MemStats

MODELS = """
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
    (tmp_path / "traced_models.py").write_text(MODELS)
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
