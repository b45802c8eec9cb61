"""Tests of ``shardwise.cli.run_as_library``, which runs a program with shardwise in place of another library.

Child processes and argument parsers of the program work. Names of ColossalAI and Lightning that do not exist here
raise an error with advice that works.
"""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise.fabric
import shardwise.lightning
from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.cli import run_as_library
from shardwise.deepspeed.logs import LOG
from tests.support.on_ranks import raises
from tests.support.program_setup import python, surroundings

CHILDREN = """
import importlib, multiprocessing, subprocess, sys
import colossalai.nn

def tell(queue):
    queue.put((colossalai.__name__, importlib.import_module("colossalai.nn").__name__))

ASK = (
    "import sys, importlib.metadata as m, importlib.util as u; assert 'torch' not in sys.modules;"
    "print(u.find_spec('colossalai').origin, m.version('colossalai'), sys.own_site, *sys.path)"
)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    print(*queue.get())
    child.join()
    print(subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout)
"""


def test_child_processes_use_shardwise(tmp_path: Path) -> None:
    """Children by multiprocessing's spawn, which imports the program again, and by subprocess."""
    (tmp_path / "program.py").write_text(CHILDREN)
    # The site's own sitecustomize must still run.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own_site = 'own'\n")
    command = ["-m", "shardwise.cli.run_as_library", "colossalai", "program.py"]
    shown = python(*command, cwd=tmp_path, env=surroundings(tmp_path))
    assert shown.returncode == 0, shown.stderr
    spawned, started = shown.stdout.splitlines()[:2]
    assert spawned == "shardwise.colossalai shardwise.colossalai.nn"
    assert started.startswith("shardwise.colossalai 0.5.0 own ") and "children" not in started

    # A child that cannot install the names exits, because it would use another library than its parent.
    broken = {"SHARDWISE_AS": "colossalai", "PYTHONPATH": str(run_as_library.CHILDREN)}
    program = "import sys, types; sys.modules['colossalai'] = types.ModuleType('colossalai'); import sitecustomize"
    again = python("-S", "-c", program, env=surroundings(**broken))
    assert again.returncode == 1
    assert "SHARDWISE_AS='colossalai': colossalai is" in again.stderr


THREADS = """
import sys, threading
from shardwise.compat.import_hooks import impersonate

def read():
    while "deepspeed" not in sys.modules and "shardwise.deepspeed" not in sys.modules:
        pass
    from deepspeed import initialize

impersonate("deepspeed")
thread = threading.Thread(target=read)
thread.start()
import deepspeed
thread.join()
"""


def test_thread_that_imports_the_library_meanwhile() -> None:
    shown = python("-c", THREADS)
    assert shown.returncode == 0 and "ImportError" not in shown.stderr, shown.stderr


@pytest.mark.parametrize("program", [["missing.py"], ["-m", "missing"]])
def test_missing_program_prints_one_line(tmp_path: Path, program: list[str]) -> None:
    shown = python(
        "-m", "shardwise.cli.run_as_library", "deepspeed", *program, cwd=tmp_path, env=surroundings(tmp_path)
    )
    assert shown.returncode == 2 and shown.stderr.count("\n") == 1 and "missing" in shown.stderr, shown.stderr


@pytest.mark.parametrize(
    ("arguments", "launched", "expected"),
    [
        (["--lr", "1", "--local_rank"], "1", [1, 1, -1]),
        (["--lr", "1", "--local-rank"], "1", [1, 1, -1]),
        (["--local_rank=7", "--local_rank"], "1", [7, 7, 7]),
        (["--lr", "1", "--local_rank"], "", [-1, -1, -1]),
        (["plain", "--lr", "1"], "1", []),
    ],
)
def test_argument_parsers_get_the_local_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], launched: str, expected: list[int]
) -> None:
    """DeepSpeed's launcher passes --local_rank; without it, such programs train each rank alone."""
    facts = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": launched, "LOCAL_WORLD_SIZE": "2"} if launched else {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
    run_as_library._give_local_rank()
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    if expected:
        parser.add_argument(sys.argv.pop(), type=int, default=-1, dest="local_rank")
    else:
        parser.add_argument("kind")
    own = sys.argv[1:]
    found = [parser.parse_args(), parser.parse_args(list(own)), parser.parse_args([*own[:1], *own[1:], "--lr", "3"])]
    assert [each.local_rank for each in found if expected] == expected
    assert sys.argv[1:] == own and (expected or found[0].kind == "plain")


def test_master_weights_and_moving_a_boosted_model() -> None:
    torch.manual_seed(0)
    own = nn.Linear(3, 2)
    before = own.weight.detach().clone()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    assert not hasattr(optimizer, "_param_store")
    # Master weights start with the original values, not with rounded ones.
    one = booster.plugin.session(model).one(own.weight)
    assert own.weight.dtype is torch.bfloat16 and not torch.equal(own.weight.float(), before)
    assert torch.equal(one.value(), before) and torch.equal(one.value(own=True), before.flatten())
    assert torch.equal(model.state_dict()["weight"], before)
    assert model.to("cpu") is model
    raises(RuntimeError, r"cannot become .*param_host_fraction=1.0.*offload='host'", lambda: model.to("meta"))
    booster.plugin.session(model).close()


@pytest.mark.parametrize("package", [shardwise.lightning, shardwise.fabric])
@pytest.mark.parametrize("name", ["deepspeed_engine", "_deepspeed_engine"])
def test_missing_engine_of_a_strategy(package: object, name: str) -> None:
    level = LOG.level
    try:
        strategy = package.DeepSpeedStrategy(stage=2)  # type: ignore[attr-defined]
    finally:
        LOG.setLevel(level)  # Fabric's strategy sets the level
    assert not hasattr(strategy, name)
    raises(AttributeError, r"strategy\.session.*get_grad_norm.*checkpoints\.save", lambda: getattr(strategy, name))
