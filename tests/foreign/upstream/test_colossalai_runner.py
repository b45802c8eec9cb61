"""The runners of ColossalAI's own programs and tests, on a checkout that is made up."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.upstream import names_colossalai, programs_colossalai, run_colossalai
from tests.foreign.upstream.names_colossalai import imported, missing, shown
from tests.foreign.upstream.run_colossalai import kept, table

Run = Callable[..., tuple[int, str]]
TESTS = """
import os
import pytest
import torch
import torch.distributed as dist
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.legacy.amp import convert_to_apex_amp
from colossalai.tensor.colo_parameter import ColoParameter
from colossalai.testing import clear_cache_before_run, spawn
from tests.kit.model_zoo import model_zoo

def on_ranks(rank, world_size, port, wrong):
    colossalai.launch(rank=rank, world_size=world_size, port=port, host="localhost", backend="nccl")
    total = torch.full((1,), float(rank), device="cuda").cuda().to(get_accelerator().get_current_device())
    dist.all_reduce(total)
    assert total.item() == 1.0 + wrong

@pytest.mark.parametrize("wrong", [0, 1])
def test_ranks(wrong):
    spawn(on_ranks, 2, wrong=wrong)

def test_zoo():
    assert model_zoo == {"here": 1}
    assert os.path.isfile(os.environ["LLAMA_PATH"] + "/model.safetensors.index.json")

def test_what_they_compare_with():
    model, rows = torch.nn.Linear(4, 2), torch.randn(3, 4)
    whole = torch.nn.Linear(4, 2)
    whole.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(whole.parameters(), lr=1.0)
    model, optimizer = convert_to_apex_amp(
        model, torch.optim.SGD(model.parameters(), lr=1.0), {"opt_level": "O2", "loss_scale": 8}
    )
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(model(rows).square().sum())
        optimizer.step()
        plain.zero_grad()
        whole(rows.half().float()).square().sum().backward()
        plain.step()
    assert model.weight.dtype is torch.float16 and model(rows).dtype is torch.float32
    torch.testing.assert_close(model.weight.float(), whole.weight, rtol=3e-2, atol=3e-2)

@clear_cache_before_run()
def caught():
    try:
        raise KeyError("here")
    except Exception as error:
        return repr(error)

def test_what_they_catch(early_stop: bool = True):
    assert caught() == "KeyError('here')" and not early_stop
    assert all(isinstance(each, ColoParameter) for each in torch.nn.Linear(1, 1).parameters())

def test_convolutions_of_halves():
    layer, rows = torch.nn.Conv1d(4, 2, 3).half(), torch.randn(3, 4, 8).half()
    found = layer(rows)
    expected = torch.conv1d(rows.float(), layer.weight.float(), layer.bias.float())
    found.square().sum().backward()
    assert found.dtype is layer.weight.grad.dtype is torch.float16 and torch.equal(found, expected.half())
    with torch.autocast("cpu", torch.float16):
        assert layer.float()(rows.float()).dtype is torch.float16
    assert layer(rows.float()).dtype is torch.float32

@pytest.mark.skip("not now")
def test_skipped():
    pass
"""
TESTING = """
import functools
import torch.multiprocessing as mp

def spawn(function, nprocs, **kwargs):
    mp.spawn(functools.partial(function, world_size=nprocs, port=29511, **kwargs), nprocs=nprocs)

def clear_cache_before_run():
    return lambda function: lambda *args, **kwargs: (function(*args, **kwargs), None)[1]
"""
FILES = {
    "colossalai/testing/__init__.py": TESTING,
    "tests/kit/__init__.py": "",
    "tests/kit/model_zoo/__init__.py": "model_zoo = {}\nfrom . import family, absent",
    "tests/kit/model_zoo/family.py": "from . import model_zoo\nmodel_zoo['here'] = 1",
    "tests/kit/model_zoo/absent.py": "import no_such_package",
    "tests/test_cluster/test_made_up.py": TESTS,
    "tests/test_cluster/test_cannot_be_imported.py": "import no_such_package",
    "examples/train.py": "import no_such_package.deep as n\nfrom colossalai.booster import Booster\nif __name__ == "
    "'__main__':\n    n.no()",
    "examples/lost.py": "from colossalai.booster import NoSuchName\nif __name__ == '__main__':\n    pass",
    "applications/App/own/__init__.py": "A = 1",
    "applications/App/run.py": "import colossalai\nfrom own import A\nif __name__ == '__main__':\n    pass",
    "applications/App/other.py": "if __name__ == '__main__':\n    import torch",
}


def write(checkout: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``python -m`` of a runner, in this process: the exit status, and what it printed."""

    def called(runner: Any, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [runner.__name__, *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                status = runner.main()
            except SystemExit as ended:
                status = int(ended.code or 0)
        return status, "".join(capsys.readouterr())

    return called


@pytest.mark.campaign
def test_what_runs_of_a_checkout_is_told_with_reasons(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "checkout", FILES)
    checkout = str(tmp_path / "checkout")
    status, told = run(programs_colossalai, checkout)
    assert status == 0 and "2 of 3 get past their imports" in told, told
    assert "examples/train.py: past, without no_such_package" in told and "applications/App/run.py: past" in told
    assert "examples/lost.py: " in told and "NoSuchName" in told
    results = tmp_path / "found.jsonl"
    earlier = {
        "file": "test_zero/test_b.py",
        "test": "test",
        "status": "failed",
        "why": "TimeoutError: 4 ranks",
        "seconds": 1,
    }
    results.write_text(json.dumps(earlier) + "\n", "utf-8")
    status, told = run(run_colossalai, checkout, "--seconds", "100", "--results", str(results))
    assert status == 1 and "5 passed, 2 failed, 1 skipped" in told, told
    alone = "test_cluster/test_cannot_be_imported.py::not imported"
    assert f"without a known reason: ['{alone}', 'test_cluster/test_made_up.py::test_ranks[1]']" in told
    assert "passed" in next(line for line in told.splitlines() if "test_ranks[0]" in line)
    assert "AssertionError" in next(line for line in told.splitlines() if "test_ranks[1]" in line)
    lines = table(kept(results)).splitlines()
    assert "| `test_cluster` | 5 | 2 | 1 |" in lines and "| `test_zero` | 0 | 1 | 0 |" in lines, lines
    assert lines[-1] == "| `test_zero/test_b.py::test` | slow | TimeoutError: 4 ranks |"
    status, told = run(run_colossalai, str(tmp_path))
    assert status == 2 and "tests/kit" in told


def test_names_that_a_checkout_has_and_we_have_not_are_told(tmp_path: Path, run: Run) -> None:
    files = {
        "colossalai/__init__.py": "from .initialize import launch\nfrom .initialize import *",
        "colossalai/initialize.py": "import os\nclass Unheard: pass\ndef launch(): pass\ndef _own(): pass",
        "colossalai/_private.py": "def hidden(): pass",
        "colossalai/booster/__init__.py": "from colossalai.booster.booster import Booster\nfrom os import path",
        "docs/source/en/page.md": "```python\nfrom colossalai.zero import GeminiDDP\n```\n```python\n...(\n```",
        "examples/a.py": "from colossalai.nn import HybridAdam, Nothing\nfrom .colossalai import x\nimport colossalai",
        "tests/data.json": "{}",
    }
    write(tmp_path, files)
    assert shown(tmp_path) == {
        ("colossalai", "launch"),
        ("colossalai.initialize", "Unheard"),
        ("colossalai.initialize", "launch"),
        ("colossalai.booster", "Booster"),
    }
    used = {("colossalai.zero", "GeminiDDP"), ("colossalai.nn", "HybridAdam"), ("colossalai.nn", "Nothing")}
    assert imported(tmp_path) == used
    assert missing(shown(tmp_path) | used) == {("colossalai.initialize", "Unheard"), ("colossalai.nn", "Nothing")}
    status, told = run(names_colossalai, str(tmp_path))
    assert status == 1 and "1 missing of its own\n  colossalai.initialize.Unheard\n" in told, told
    assert "colossalai.nn.Nothing\nof 4 public names, and 3 that programs and pages import" in told
    assert run(names_colossalai, str(tmp_path / "docs"))[0] == 2
