"""Tests of the project's test runner and of ``shardwise.testing`` without processes.

- Which tests each set runs, in which order, and what a failed test prints.
- Two pytest processes on the same files report as one.
- ``shardwise.testing``: functions by name, pickling, comparisons, and the reference training (oracle).
"""

import math
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing import PlainRecipe, RankPool, assert_close, train_plain
from shardwise.testing.worker import dump, load, make_task
from tests.support.models import MODELS, make_batches
from tests.support.on_ranks import raises

CONFTEST = """
import pytest
from tests.support import sets

pytest_addoption, pytest_configure, pytest_collection_modifyitems = sets.add_options, sets.configure, sets.select

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        report.sections.append(sets.how_to_repeat(item, []))
    return report
"""
TESTS = """
import pytest
from tests.support.sets import campaign, full

@pytest.mark.parametrize("row", ["a", *full("b", pytest.param("c", id="third")), *campaign("d")])
def test_rows(row): pass

@pytest.mark.parametrize(("x", "y"), [(1, 2), *full((3, 4))])
def test_pairs(x, y): pass

@pytest.mark.full
def test_function(): assert 1 == 2, "as it should"
"""
QUICK = {"test_rows[a]", "test_pairs[1-2]"}
FULL = QUICK | {"test_rows[b]", "test_rows[third]", "test_pairs[3-4]", "test_function"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tests = tmp_path / "it's a folder"
    tests.mkdir()
    (tests / "conftest.py").write_text(CONFTEST, "utf-8")
    (tests / "test_it.py").write_text(TESTS, "utf-8")
    return tests


def pytested(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest without other packages' plugins, whose imports would take most of the time."""
    path = os.pathsep.join(map(str, Path(__file__).resolve().parents[2:4]))
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", *options]
    streams = {"capture_output": True, "encoding": "utf-8", "timeout": 600}
    return subprocess.run(command, cwd=folder, env=environment | {"PYTHONPATH": path}, check=False, **streams)


def run(folder: Path, *options: str) -> tuple[list[str], str]:
    """Return the names of the tests that ran, in order, and everything that was printed."""
    done = pytested(folder, "-v", *options)
    return re.findall(r"::(\S+) (?:PASSED|FAILED)", done.stdout), done.stdout + done.stderr


def test_tests_of_each_set(folder: Path) -> None:
    for expected, *options in (
        (QUICK, "."),
        (FULL, "--full", "."),
        ({"test_rows[d]"}, "-m", "campaign", "."),
        (FULL, "test_it.py"),
        ({"test_function"}, "test_it.py::test_function"),
    ):
        names, output = run(folder, *options)
        assert set(names) == expected, output


def test_the_command_of_a_failed_test_repeats_it(folder: Path) -> None:
    output = run(folder, "--full", ".")[1]
    command = output.split("Repeat this test alone")[1].splitlines()[1]
    assert shlex.split(command)[:2] == ["cd", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command += f" -c {os.devnull} --rootdir ."
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, encoding="utf-8")
    assert "1 failed in" in done.stdout and "as it should" in done.stdout, done.stdout + done.stderr


SIDE_CONFTEST = """
import os, pathlib, time
import pytest
from side_by_side import add_options as pytest_addoption, configure as pytest_configure

@pytest.fixture
def other():
    # Waits until both processes have a file, so that neither does everything.
    folder = pathlib.Path(__file__).parent / "who"
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + 300
    while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.01)
"""
FILES = {
    "test_a.py": "import os\ndef test_first(other): pass\ndef test_wrong(): assert 1 == 2, 'seen in a'",
    "test_b.py": "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_more(i): pass",
    "test_c.py": "import pytest\ndef test_skipped(): pytest.skip('no reason')",
    "test_d.py": "import warnings\ndef test_last(other): warnings.warn('seen in d')\n"
    "def test_bad(): assert 3 == 4, 'and in d'",
}


def side_run(folder: Path, *options: str, **changed: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(SIDE_CONFTEST)
    for name, text in {**FILES, **changed}.items():
        (folder / name).write_text(text)
    return pytested(folder, *options, ".")


def test_two_processes_print_one_summary_with_all_failures(tmp_path: Path) -> None:
    done = side_run(tmp_path, "--workers", "2")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"2 failed, 7 passed, 1 skipped, 1 warning in", done.stdout.splitlines()[-1]), done.stdout
    for text in ("collected 10 items", "seen in a", "and in d", "UserWarning: seen in d", "100%"):
        assert done.stdout.count(text) >= 1, done.stdout
    for name in FILES:
        assert len(re.findall(rf"^{name} [.Fs]+", done.stdout, re.M)) == 1, "each file once, in one piece"
    assert len(list((tmp_path / "who").iterdir())) == 2
    alone = side_run(tmp_path)
    assert "2 failed, 7 passed, 1 skipped, 1 warning in" in alone.stdout.splitlines()[-1]


def test_death_of_the_second_process_is_an_error(tmp_path: Path) -> None:
    done = side_run(tmp_path, "--workers", "2", **{"test_d.py": "import os\ndef test_last(other): os._exit(0)"})
    assert done.returncode != 0 and "passed" in done.stdout.splitlines()[-1], done.stdout
    assert re.search(r"code 0; .*1 of test_\w.py were not finished by it", done.stdout), done.stdout


def double(x: int) -> int:
    return 2 * x


def test_tasks_carry_functions_by_name_and_arguments_by_value() -> None:
    task = make_task(double, (4,))
    assert pickle.loads(task.function) is double
    assert load(task.arguments) == (4,)
    assert task.label.endswith(":double")


def test_pool_refuses_invalid_arguments() -> None:
    def nested() -> None: ...

    for fn in (lambda: None, nested):
        raises(ValueError, "top level of a module", make_task, fn, ())
    raises(ValueError, "world_size=0", RankPool, 0)
    raises(ValueError, "timeout=0", RankPool(1).run, double, 1, timeout=0)


def test_pickled_modules_keep_tied_parameters() -> None:
    model = MODELS["tied"].factory()
    copy = load(dump(model))
    assert copy.head.weight is copy.embedding.weight
    assert torch.equal(copy.head.weight, model.head.weight)


def test_assert_close_returns_the_error() -> None:
    expected = {"a": torch.tensor([1.0, -4.0]), "empty": torch.empty(0, 3), "n": torch.tensor(3)}
    assert assert_close(expected, expected, 0.0, "same") == 0.0
    actual = expected | {"a": torch.tensor([1.0, -4.0 + 4e-3])}
    assert assert_close(actual, expected, 2e-3, "near") == pytest.approx(1e-3, rel=1e-2)


def test_assert_close_fails_on_every_kind_of_difference() -> None:
    for actual, message in (
        ({}, "missing: a"),
        ({"a": torch.ones(2, 2), "b": torch.ones(1)}, "extra: b"),
        ({"a": torch.ones(4)}, r"a: shape \(4,\), expected \(2, 2\)"),
        ({"a": torch.ones(2, 2, dtype=torch.float64)}, "a: torch.float64, expected torch.float32"),
        ({"a": torch.tensor([[1.0, 1.0], [math.nan, 9.0]])}, r"a\[1\]\[0\]: got nan, expected 1.0"),
        ({"a": torch.tensor([[1.0, 1.0], [math.inf, 9.0]])}, r"a\[1\]\[0\]: got inf, expected 1.0"),
        ({"a": torch.tensor([[1.0, 1.1], [1.0, 1.3]])}, r"a\[1\]\[1\]: got 1.29\d*, expected 1.0, relative error 0.3"),
    ):
        caught = raises(AssertionError, message, assert_close, actual, {"a": torch.ones(2, 2)}, 0.05, "what")
        assert caught.startswith("what:")


def test_assert_close_with_nan_and_infinity() -> None:
    nan = {"a": torch.tensor([math.nan, 1.0])}
    raises(AssertionError, None, lambda: assert_close(nan, nan, 1.0, "nan"))
    inf = {"a": torch.tensor([math.inf, -math.inf, 2.0])}
    assert assert_close(inf, inf, 0.0, "inf") == 0.0
    raises(AssertionError, None, assert_close, {"a": -inf["a"]}, inf, 1e9, "wrong sign")
    raises(AssertionError, None, assert_close, {"a": torch.ones(1)}, {"a": torch.zeros(1)}, 1.0, "nothing expected")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_oracle_rounds_half_gradients_once() -> None:
    """On three ranks with gradients 1, 2**-8 and 2**-8 a bf16 sum would lose the small ones; an fp32 sum does not."""
    case_batches = [[[torch.tensor([value]) for value in (1.0, 2.0**-8, 2.0**-8)]]]

    def factory() -> nn.Module:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        return layer

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()  # type: ignore[no-any-return]

    run = train_plain(factory, loss, sgd, case_batches, PlainRecipe(param_dtype=torch.bfloat16))
    once, lossy = (float(torch.tensor(total / 3).bfloat16()) for total in (1.0 + 2.0**-7, 1.0))
    assert run.gradients[0]["weight"].item() == once != lossy
    assert run.masters[0]["weight"].dtype is torch.float32
    assert run.parameters[0]["weight"].dtype is torch.bfloat16


def test_oracle_skips_an_overflow_under_a_loss_scale() -> None:
    case = MODELS["mlp"]
    batches = make_batches(case, 1, steps=1)
    recipe = PlainRecipe(param_dtype=torch.float16, loss_scale=2.0**30)
    run = train_plain(case.factory, case.loss, sgd, batches, recipe)
    assert run.skipped == [True]
    assert_close(run.masters[0], dict(case.factory().named_parameters()), 0.0, "unchanged")
