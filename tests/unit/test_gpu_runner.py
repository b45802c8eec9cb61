"""``python tests/gpu``: which tests its options select, how parts divide them, and what it records."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.parts import FIRST_TESTS, LATER_TESTS
from tests.support.launching import finished


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
