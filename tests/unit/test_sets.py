"""Which tests each command runs, in which order, and what a failed one prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(folder: Path, *options: str) -> tuple[list[str], str]:
    """The names of the tests that ran, in their order, and everything that was printed."""
    bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONUTF8": "1"}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])} | bare
    command = [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, "--rootdir", str(folder), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
    return re.findall(r"::(\S+) (?:PASSED|FAILED)", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["."], QUICK),
        (["--full", "."], FULL),
        (["-m", "campaign", "."], {"test_rows[d]"}),
        (["test_it.py"], FULL),
        (["test_it.py::test_function"], {"test_function"}),
    ],
    ids=["quick", "full", "campaign", "file", "test"],
)
def test_what_each_set_runs(folder: Path, options: list[str], expected: set[str]) -> None:
    names, output = run(folder, *options)
    assert set(names) == expected, output


def test_the_command_of_a_failed_test_repeats_it(folder: Path) -> None:
    output = run(folder, "--full", ".")[1]
    command = output.split("Repeat this test alone")[1].splitlines()[1]
    assert shlex.split(command)[:2] == ["cd", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        f"{command} -c {os.devnull} --rootdir .", shell=True, env=environment, capture_output=True, encoding="utf-8"
    )
    assert "1 failed in" in done.stdout and "as it should" in done.stdout, done.stdout + done.stderr
