"""The tests for GPUs run without pytest as with it: the same ones, and a failure is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from launching import finished

ROOT = Path(__file__).resolve().parents[2]
ODD = '''
import sys, types
sys.path.insert(0, "tests")
from pathlib import Path
from gpu import without_pytest
from gpu.records import Records

without_pytest.install()
TEXT = """
import pytest

ended = []

@pytest.fixture(scope="session")
def whole():
    yield [1]
    ended.append("session")

@pytest.fixture(params=[1, 2], ids=["one", "two"])
def number(request, whole):
    yield request.param + 10 * whole[0]
    ended.append("test")

@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(("x", "y"), [(1, 2.0)])
def test_values(number, name, x, y, tmp_path):
    (tmp_path / name).touch()
    assert number in (11, 12) and (x, y) == (1, 2.0) and name in "ab"

def test_fails():
    assert 1.0 == pytest.approx(1.1), "the two differ"

def test_approx():
    nan = float("nan")
    assert [1.0, None] == pytest.approx([1.0 + 1e-9, None]) and 1.0 != pytest.approx(nan) and nan != pytest.approx(1.0)
    assert not nan == pytest.approx(nan) and [1.0] != pytest.approx([1.0, 2.0])

@pytest.mark.gpus(99)
def test_skipped():
    raise AssertionError
"""
module = types.ModuleType("gpu.test_odd")
exec(TEXT, vars(module))
sys.modules["gpu.test_odd"] = module
without_pytest.run([Path("test_odd.py")], "cpu", 1, Records(Path(sys.argv[1])))
assert module.ended == ["test"] * 4 + ["session"], module.ended
'''


def _names(log: Path, *way: str) -> set[str]:
    status, shown = finished("tests.gpu", "--collect", "--device", "cpu", *way, log=log)
    assert status == 0, shown
    return {line.removeprefix("tests/gpu/") for line in shown.splitlines() if "::" in line}


def test_both_ways_know_the_same_tests(tmp_path: Path) -> None:
    """No test is lost where pytest is not installed."""
    expected, found = _names(tmp_path / "with"), _names(tmp_path / "without", "--without-pytest")
    assert len(expected) > 400 and found == expected


def test_fixtures_parameters_and_outcomes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ODD, str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["line"] == "1 failed, 1 skipped, 5 passed" and not found["running"]
    assert list(found["failed"]) == ["test_odd.py::test_fails"]
    assert "the two differ" in found["failed"]["test_odd.py::test_fails"]
    (reason,) = found["skipped"]
    assert reason.startswith("needs 99 CUDA device(s), ")
    assert "passed test_odd.py::test_values[one-1-2.0-a]" in done.stdout
