"""The tests for GPUs run without pytest as with it: the same ones, and a failure is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import finished
from program_setup import forked_python, python, surroundings

from benchmarks.gpu.driver import OUT
from benchmarks.gpu.parts import FIRST_TESTS, LATER_TESTS, parts
from benchmarks.gpu.results import Facts

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Facts("a processor", 0, 2**36, 2**36, 0, "2.13.0", "3.12.3", True)
ODD = '''
import sys, types
sys.path.insert(0, "tests")
from pathlib import Path
from gpu import without_pytest
from gpu.choice import Choice
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
without_pytest.run([Path("test_odd.py")], "cpu", Choice(), Records(Path(sys.argv[1])))
assert module.ended == ["test"] * 4 + ["session"], module.ended
'''


def _names(log: Path, *way: str) -> set[str]:
    status, shown = finished("tests.gpu", "--collect", "--device", "cpu", *way, log=log)
    assert status == 0, shown
    return {line.removeprefix("tests/gpu/") for line in shown.splitlines() if "::" in line}


@pytest.mark.full
def test_both_ways_know_the_same_tests(tmp_path: Path) -> None:
    """No test is lost where pytest is not installed."""
    expected, found = _names(tmp_path / "with"), _names(tmp_path / "without", "--without-pytest")
    assert len(expected) > 400 and found == expected
    # Parts that take some of a file take all of it together, and have the time for it.
    taken: list[str] = []
    for part, tests in (FIRST_TESTS | LATER_TESTS).items():
        of_file = [name for name in expected if name.startswith(f"test_{part.split()[0]}.py::")]
        functions = {name: name.partition("::")[2].partition("[")[0] for name in of_file}
        chosen = [n for n, f in functions.items() if f not in tests.but and (not tests.only or f in tests.only)]
        assert len(chosen) < 40 or tests.expects_s >= 0.7 * len(chosen), part
        taken += chosen
    assert sorted(taken) == sorted(expected)


@pytest.mark.full
def test_some_of_a_file(tmp_path: Path) -> None:
    """The same under pytest and without it; a name that is none is an error."""
    given = ("test_parity.py", "--but", "test_fp32", "test_fp64", "--every", "30")
    expected = _names(tmp_path / "with", *given)
    assert expected == _names(tmp_path / "without", "--without-pytest", *given)
    assert len(expected) == 2 and not any("fp32" in name or "fp64" in name for name in expected)
    given = ("--without-pytest", "test_parity.py", "--only", "test_without_overlap_is_the_same")
    (name,) = _names(tmp_path / "one", *given)
    assert name == "test_parity.py::test_without_overlap_is_the_same"
    status, shown = finished("tests.gpu", "test_trace.py", "--only", "test_fp32", log=tmp_path / "none")
    assert status == 2 and "test_fp32: no test of test_trace.py" in shown


@pytest.mark.full
def test_another_package_named_tests_is_not_taken(tmp_path: Path) -> None:
    """The command of a part, where something has installed a regular package of that name, which wins by name."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    for name in ("tests/__init__.py", "tests/gpu/__init__.py", "tests/gpu/__main__.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    (part,) = (p for p in parts(STAND_IN, "/disk") if p.name == "tests launch")
    out = str(tmp_path / "found.json")
    command = [text.replace(OUT, out) for text in part.command]
    done = python(*command, "--without-pytest", env=surroundings(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(Path(out).read_text())["line"].endswith("skipped")


def test_fixtures_parameters_and_outcomes(tmp_path: Path) -> None:
    done = forked_python("-c", ODD, str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["line"] == "1 failed, 1 skipped, 5 passed" and not found["running"]
    assert list(found["failed"]) == ["test_odd.py::test_fails"]
    assert "the two differ" in found["failed"]["test_odd.py::test_fails"]
    (reason,) = found["skipped"]
    assert reason.startswith("needs 99 CUDA device(s), ")
    assert "passed test_odd.py::test_values[one-1-2.0-a]" in done.stdout
