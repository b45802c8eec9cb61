"""All that says which Pythons and releases of torch are supported agrees, and the page's rows are read as written."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

from tests.matrix import environment, table
from tests.matrix.cells import ROOT, Cell, cells, constraints, dotted, minor_of, pins, supported
from tests.matrix.table import Row, not_tried, read, written

PYTHONS, TORCHES = supported()
FIRST, LAST = dotted(PYTHONS[0]), dotted(PYTHONS[-1])


def text_of(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


# ---- the project's files


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
