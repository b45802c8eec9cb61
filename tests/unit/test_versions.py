"""All that says which Pythons and releases of torch are supported agrees, and the script that tries them is right."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.matrix import __main__ as command
from tests.matrix import environment, table
from tests.matrix.cells import (
    ROOT,
    Cell,
    cells,
    constraints,
    dotted,
    interpreters,
    minor_of,
    minors,
    pins,
    supported,
)
from tests.matrix.table import Row, not_tried, read, written

PYTHONS, TORCHES = supported()
FIRST, LAST = dotted(PYTHONS[0]), dotted(PYTHONS[-1])


def text_of(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


# ---- the project's files


def test_bounds_are_read_and_others_refused() -> None:
    assert minors("torch>=2.9,<2.12") == [(2, 9), (2, 10), (2, 11)] and minors(">=3.11,<3.12") == [(3, 11)]
    for bounds in ("torch", "torch>=2.11", ">=3.11,<4.0", "torch==2.11"):
        with pytest.raises(ValueError, match=re.escape(repr(bounds))):
            minors(bounds)


def test_this_python_and_torch_are_supported() -> None:
    import torch

    assert sys.version_info[:2] in PYTHONS and minor_of(torch.__version__) in TORCHES


def test_the_makefile_has_the_bounds() -> None:
    makefile = text_of("Makefile")
    low, high = PYTHONS[0], PYTHONS[-1]
    assert f"sys.exit(not {low} <= sys.version_info[:2] <= {high})" in makefile
    names = re.search(r"(?m)^PYTHONS := (.+)$", makefile)
    assert names is not None and names[1].split() == [f"python{dotted(python)}" for python in reversed(PYTHONS)]
    release = re.search(r"(?m)^TORCH \?= (.+)$", makefile)
    assert release is not None and minor_of(release[1]) in TORCHES


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize("target", ["upstream-colossalai", "upstream-deepspeed"])
def test_a_checkout_that_is_not_there_is_an_error_before_anything_is_installed(target: str, tmp_path: Path) -> None:
    for given in ([], [f"CHECKOUT={tmp_path / 'nowhere'}"]):
        command = ["make", "-C", str(ROOT), target, f"VENV={tmp_path / 'venv'}", *given]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600)
        assert (
            done.returncode == 2
            and f"is no folder: name the checkout of the other library, make {target}" in done.stderr
        )
        assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("path", ["Makefile", "README.md", "CONTRIBUTING.md", "docs/versions.md"])
def test_sentences_have_the_bounds(path: str) -> None:
    said = re.findall(r"Python (3\.\d+) (?:to|or) (3\.\d+)", text_of(path))
    assert said and set(said) == {(FIRST, LAST)}
    releases = set(re.findall(r"torch (2\.\d+) to (2\.\d+)", text_of(path)))
    assert releases <= {(dotted(TORCHES[0]), dotted(TORCHES[-1]))} and (
        releases or path in ("Makefile", "CONTRIBUTING.md")
    )


def test_checks_are_made_for_the_oldest_python_and_ci_runs_all() -> None:
    tools = tomllib.loads(text_of("pyproject.toml"))["tool"]
    assert tools["mypy"]["python_version"] == FIRST and tools["ruff"]["target-version"] == f"py{FIRST.replace('.', '')}"
    found = re.search(r"python: \[(.+)\]", text_of(".github/workflows/ci.yml"))
    assert found is not None and found[1].replace('"', "").split(", ") == [dotted(python) for python in PYTHONS]


def test_every_release_of_torch_has_its_constraints() -> None:
    there = {path.name for path in (ROOT / "constraints").glob("torch-*.txt")}
    assert there == {constraints(torch).name for torch in TORCHES}
    for torch in TORCHES:
        found = pins(constraints(torch))
        assert minor_of(found["torch"]) == torch and {"setuptools", "numpy", "pytest", "lightning"} <= found.keys()


def test_pins_that_are_not_exact_or_said_twice_are_refused(tmp_path: Path) -> None:
    common, one = tmp_path / "common.txt", tmp_path / "one.txt"
    common.write_text("# All.\nnumpy==2.4.6\n")
    one.write_text("-c common.txt\ntorch==2.13.0\n")
    assert pins(one) == {"numpy": "2.4.6", "torch": "2.13.0"}
    for line, said in (("torch", "torch"), ("torch>=2.13", "torch"), ("NumPy==1.0", "numpy")):
        one.write_text(f"-c common.txt\n{line}\n")
        with pytest.raises(ValueError, match=said):
            pins(one)


def test_the_table_has_a_row_for_each_cell_and_none_failed() -> None:
    rows = read(table.PAGE.read_text("utf-8"))
    assert sorted(rows) == cells()
    for row in rows.values():
        assert row.good if row.tried else row.remark, f"{row}: raise a bound when its cells pass"
    for minor in (*PYTHONS, *TORCHES):
        assert any(row.good and minor in (cell.python, cell.torch) for cell, row in rows.items()), (
            f"{minor} was not tried"
        )


def test_the_short_set_is_there() -> None:
    for name in environment.SHORT_SET:
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in text_of(path)


# ---- the script


def test_cells_are_chosen_by_patterns() -> None:
    assert command.chosen(["3.12:2.13"]) == [Cell((3, 12), (2, 13))]
    assert command.chosen(["*:2.13"]) == [Cell(python, (2, 13)) for python in PYTHONS]
    assert command.chosen([]) == cells()
    with pytest.raises(ValueError, match=r"--only '2\.13'"):
        command.chosen(["2.13"])


def test_interpreters_are_found_and_given_ones_asked(tmp_path: Path) -> None:
    here = sys.version_info[:2]
    assert interpreters([sys.executable], PYTHONS)[here] == sys.executable
    missing = str(tmp_path / "python3")
    with pytest.raises(ValueError, match=re.escape(missing)):
        interpreters([missing], PYTHONS)
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3.9.1\n")
    old.chmod(0o755)
    with pytest.raises(ValueError, match=r"python: 3\.9\.1; give one of 3\.11"):
        interpreters([str(old)], PYTHONS)


PAGE = f"# Versions\n\nBefore.\n\n{table.BEGIN}\n{table.HEAD}{table.END}\n\nAfter.\n"
DONE = Row("3.12.1", "2.13.0+cpu", "2026-01-02", 812, 0, 3, 143)


def test_rows_are_written_and_read_and_the_rest_of_the_page_stays() -> None:
    later = not_tried(Cell((3, 14), (2, 11)), "no Python 3.14")
    text = written(PAGE, {row.cell: row for row in (later, DONE)})
    assert read(text) == {DONE.cell: DONE, later.cell: later}
    assert text.index("3.12.1") < text.index("3.14") and text.startswith("# Versions") and text.endswith("\n\nAfter.\n")
    assert written(text, read(text)) == text
    assert DONE.good and not later.good and not later.tried
    odd = Row("3.12.1", "2.13.0", "2026-01-02", 1, 1, 0, 1, "a.py::b: x | y\nz")
    assert read(written(PAGE, {odd.cell: odd}))[odd.cell].remark == "a.py::b: x / y z" and not odd.good


def test_pages_that_cannot_be_read_are_refused() -> None:
    for text in ("# Versions\n", PAGE.replace(table.END, "| 3.12 | x |\n" + table.END)):
        with pytest.raises(ValueError, match=r"versions\.md"):
            read(text)
    twice = written(PAGE, {DONE.cell: DONE}).replace(f"{DONE}\n", f"{DONE}\n{DONE}\n")
    with pytest.raises(ValueError, match="two rows"):
        read(twice)


PASSED = """<testsuites><testsuite tests="5" failures="0" errors="0" skipped="1" time="12.6">
<testcase classname="tests.unit.test_a" name="test_x"/>
</testsuite></testsuites>"""
FAILED = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1" time="12.6">
<testcase classname="tests.unit.test_a" name="test_x"/>
<testcase classname="tests.unit.test_a" name="test_y[1]"><failure message="Error: no&#10;more">long</failure></testcase>
<testcase classname="tests.unit.test_b" name="test_z"><error message="E">other</error></testcase>
</testsuite></testsuites>"""


class FakeRun:
    """Stands in for commands and for the list of what is installed; ``fails`` is a part of the one that ends badly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
        page.write_text(PAGE)
        self.commands: list[list[str]] = []
        self.folders: set[Path] = set()
        self.fails, self.report, self.status = "", PASSED, 0
        self.extra: dict[str, str] = {}
        monkeypatch.setattr(table, "PAGE", page)
        monkeypatch.setattr(environment, "call", self.call)
        monkeypatch.setattr(environment.Environment, "installed", self.installed)
        monkeypatch.setattr(environment, "NEEDED_GIB", 0)

    def call(self, words: Sequence[str], log: Path, limit_s: int) -> int:
        self.commands.append(list(words))
        self.folders.add(log.parent)
        log.write_text("first\nERROR: what pip says\n")
        given = [word.partition("=")[2] for word in words if word.startswith("--junitxml=")]
        if self.fails and self.fails in " ".join(words):
            return 1
        for path in given:
            Path(path).write_text(self.report)
        return self.status if given else 0

    def installed(self) -> dict[str, str]:
        return {"pip": "1", "shardwise": "1", "torch": pins(constraints((2, 13)))["torch"] + "+cpu", **self.extra}

    def main(self) -> int:
        here = dotted(sys.version_info[:2])
        return command.main(["--python", sys.executable, "--only", f"{here}:2.13"])

    def row(self) -> Row:
        (row,) = read(table.PAGE.read_text("utf-8")).values()
        return row


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRun:
    return FakeRun(monkeypatch, tmp_path / "versions.md")


def test_a_cell_that_passes_is_written_and_its_environment_deleted(fake: FakeRun) -> None:
    assert fake.main() == 0
    row = fake.row()
    assert row.good and (row.passed, row.failed, row.skipped, row.seconds) == (4, 0, 1, 13)
    assert row.torch.endswith("+cpu") and minor_of(row.python) == sys.version_info[:2]
    assert fake.folders and not any(folder.exists() for folder in fake.folders)


def test_nothing_is_installed_without_constraints_and_torch_by_its_version_alone(fake: FakeRun) -> None:
    fake.main()
    installs = [words for words in fake.commands if "install" in words]
    assert len(installs) == 2 and f"torch=={pins(constraints((2, 13)))['torch']}" in installs[1]
    for words in installs:
        assert words[words.index("-c") + 1] == str(constraints((2, 13)))
        assert not [word for word in words if re.match(r"torch(?!==)", word)]


def test_failed_tests_and_steps_make_the_status_and_show_the_first_error(
    fake: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.report = FAILED
    assert fake.main() == 1 and "long" in capsys.readouterr().out
    assert fake.row().failed == 2 and fake.row().remark == "tests/unit/test_a.py::test_y[1]: Error: no"
    fake.fails = "--no-build-isolation"
    assert fake.main() == 1 and "what pip says" in capsys.readouterr().out
    assert fake.row().remark.startswith("torch==2.13.0 and the package: status 1") and not fake.row().good
    fake.fails = "pytest"
    assert fake.main() == 1 and "no whole report" in fake.row().remark
    fake.fails, fake.report = "", "no report at all"
    assert fake.main() == 1 and "syntax error" in fake.row().remark
    fake.report, fake.status = '<testsuites><testsuite tests="0" time="0.1"/></testsuites>', 4
    assert fake.main() == 1 and fake.row().remark.startswith("the tests ended with status 4")
    assert not any(folder.exists() for folder in fake.folders)


def test_what_is_not_pinned_is_a_failure(fake: FakeRun) -> None:
    fake.extra = {"numpy": "0.1", "surprise": "2.0"}
    assert fake.main() == 1
    assert fake.row().remark == "torch-2.13.txt does not pin what was installed: numpy==0.1 surprise==2.0"
    fake.extra = {"torch": "2.14.0"}
    assert fake.main() == 1 and "torch==2.14.0" in fake.row().remark


def test_a_cell_without_an_interpreter_says_so(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "interpreters", lambda given, pythons: {})
    assert fake.main() == 1
    assert fake.row() == not_tried(fake.row().cell, f"no Python {dotted(sys.version_info[:2])} on the machine")


def test_a_result_is_kept_when_its_cell_is_not_tried_again(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.main()
    done = fake.row()
    monkeypatch.setattr(environment, "NEEDED_GIB", 10**9)
    assert fake.main() == 1 and fake.row() == done
    table.PAGE.write_text(PAGE)
    assert fake.main() == 1 and "GiB of disk were free" in fake.row().remark


def test_cells_that_there_are_not_are_refused(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "3.9:2.13"]) == 2 and "no such cell" in capsys.readouterr().err
    assert command.main(["--list"]) == 0 and "no row" in capsys.readouterr().out and not fake.commands


def test_commands_are_ended_with_what_they_started(tmp_path: Path) -> None:
    log, quick = tmp_path / "log", [sys.executable, "-c", "import sys; print('said'); sys.exit(3)"]
    assert environment.call(quick, log, 60) == 3 and "said" in log.read_text()
    assert environment.call([sys.executable, "-c", "import time; time.sleep(600)"], log, 0) < 0
    assert "did not end in 0 s" in log.read_text()
