"""``python tests/gpu``: which tests its options select, how parts divide them, and what it records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program_setup import python, surroundings

from benchmarks.gpu.driver import OUT
from benchmarks.gpu.parts import FIRST_TESTS, LATER_TESTS, parts
from benchmarks.gpu.results import Facts
from tests.support.launching import finished

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Facts("a processor", 0, 2**36, 2**36, 0, "2.13.0", "3.12.3", True)


def _names(log: Path, *way: str) -> set[str]:
    status, shown = finished("tests.gpu", "--collect", "--device", "cpu", *way, log=log)
    assert status == 0, shown
    return {line.removeprefix("tests/gpu/") for line in shown.splitlines() if "::" in line}


@pytest.mark.full
def test_parts_run_every_test_once(tmp_path: Path) -> None:
    """Parts that take some of a file take all of it together, and have the time for it."""
    expected, taken = _names(tmp_path / "all"), list[str]()
    for part, tests in (FIRST_TESTS | LATER_TESTS).items():
        of_file = [name for name in expected if name.startswith(f"test_{part.split()[0]}.py::")]
        functions = {name: name.partition("::")[2].partition("[")[0] for name in of_file}
        chosen = [n for n, f in functions.items() if f not in tests.but and (not tests.only or f in tests.only)]
        assert len(chosen) < 40 or tests.expects_s >= 0.7 * len(chosen), part
        taken += chosen
    assert len(expected) > 400 and sorted(taken) == sorted(expected)


@pytest.mark.full
def test_some_of_a_file(tmp_path: Path) -> None:
    names = _names(tmp_path / "but", "test_parity.py", "--but", "test_fp32", "test_fp64", "--every", "30")
    assert len(names) == 2 and not any("fp32" in name or "fp64" in name for name in names)
    only = "test_without_overlap_is_the_same"
    assert _names(tmp_path / "only", "test_parity.py", "--only", only) == {f"test_parity.py::{only}"}
    status, shown = finished("tests.gpu", "test_trace.py", "--only", "test_fp32", log=tmp_path / "none")
    assert status == 2 and "test_fp32: no test of test_trace.py" in shown


SLOW = ("test_auto_gives_the_bits_of_fixed_homes_on_the_host", "test_the_margin_holds_optimizer_state")


@pytest.mark.full
def test_some_run_on_a_cpu(tmp_path: Path) -> None:
    way = ("--device", "cpu", "--every", "16", "--but", *SLOW, "test_torchrun_with_one_process")
    status, shown = finished("tests.gpu", *way, log=tmp_path / "some")
    counts = dict(reversed(part.split()) for part in shown.splitlines()[-1].split(", "))
    assert status == 0 and int(counts["passed"]) > 15 and "failed" not in counts, shown


@pytest.mark.full
def test_another_package_named_tests_is_not_taken(tmp_path: Path) -> None:
    """The command of a part, where something has installed a regular package of that name, which wins by name."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    for name in ("tests/__init__.py", "tests/gpu/__init__.py", "tests/gpu/__main__.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    (part,) = (p for p in parts(STAND_IN, "/disk") if p.name == "tests launch")
    out = str(tmp_path / "found.json")
    command = [text.replace(OUT, out) for text in part.command]
    done = python(*command, env=surroundings(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(Path(out).read_text())
    (reason,) = record["skipped"]
    assert (
        record["line"].endswith("skipped") and reason.startswith("needs 1 CUDA device(s), ") and not record["running"]
    )
