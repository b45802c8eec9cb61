"""What is said of a run of another library's own tests; the runs themselves need a checkout of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.foreign.upstream.run_deepspeed import CHOSEN, HERE, kept, main, reasons, table

FOUND = [
    {"test": "unit/runtime/zero/test_a.py::Test::test[1]", "outcome": "passed", "why": ""},
    {"test": "unit/runtime/zero/test_a.py::Test::test[2]", "outcome": "failed", "why": "KeyError: 0x7f12"},
    {"test": "unit/runtime/zero/test_a.py::Test::test[3]", "outcome": "failed", "why": "KeyError: 0x7e00"},
    {"test": "unit/utils/test_b.py", "outcome": "not collected", "why": "ImportError: c"},
    {"test": "unit/utils/test_d.py::test", "outcome": "skipped", "why": "no GPU"},
]


def test_outcomes_are_counted_by_folder_and_errors_by_what_they_say() -> None:
    assert table(FOUND).splitlines()[2:] == [
        "| all | 1 | 2 | 1 | 1 |",
        "| runtime/zero | 1 | 2 | 0 | 0 |",
        "| utils | 0 | 0 | 1 | 1 |",
    ]
    assert reasons(FOUND).splitlines() == [
        "   2  KeyError: 0x...",
        "      unit/runtime/zero/test_a.py::Test::test[2]",
        "   1  ImportError: c",
        "      unit/utils/test_b.py",
    ]
    assert len(CHOSEN) == len(set(CHOSEN)) and (HERE / "beside" / "sitecustomize.py").is_file()


def test_parts_are_put_together_and_the_last_run_of_a_test_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = {**FOUND[1], "outcome": "passed"}
    (tmp_path / "old").write_text("".join(f"{json.dumps(each)}\n" for each in FOUND), "utf-8")
    (tmp_path / "new").write_text(f'{json.dumps(again)}\n{{"test": "cut by a ki', "utf-8")
    assert [each["outcome"] for each in kept([tmp_path / "old"])] == [each["outcome"] for each in FOUND]
    monkeypatch.setattr(sys, "argv", ["run", "--kept", str(tmp_path / "old"), str(tmp_path / "new")])
    assert main() == 0
    assert "| all | 2 | 1 | 1 | 1 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit):
        main()
    assert "--checkout is missing" in capsys.readouterr().err


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.foreign.upstream.run_deepspeed", "--checkout", str(tmp_path)]
    ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, encoding="utf-8", check=False)
    assert ended.returncode == 2 and f"there is no {tmp_path / 'tests' / 'unit' / 'common.py'}" in ended.stderr
