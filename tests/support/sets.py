"""The three sets of tests, their order, and the command that repeats a failed test. See CONTRIBUTING.md."""

import random
import shlex
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

MARKS = {
    "full": "pairs of factors and costly cases: --full runs them, and so does naming their file or test",
    "campaign": "the larger sets, for hours: -m campaign selects them, nothing else does",
}


def full(*rows: Any) -> list[Any]:
    """Mark rows of ``pytest.mark.parametrize`` that only ``make test-full`` runs."""
    return _marked(pytest.mark.full, rows)


def campaign(*rows: Any) -> list[Any]:
    """Mark rows of ``pytest.mark.parametrize`` that only ``make campaign`` runs."""
    return _marked(pytest.mark.campaign, rows)


def _marked(mark: pytest.MarkDecorator, rows: Iterable[Any]) -> list[Any]:
    marked = []
    for row in rows:
        if isinstance(row, type(pytest.param())):
            marked.append(row._replace(marks=[*row.marks, mark]))
        else:
            marked.append(pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark))
    return marked


def add_options(parser: pytest.Parser) -> None:
    """Add the options (``pytest_addoption``)."""
    parser.addoption("--full", action="store_true", help="run the tests that are marked full, too")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in random order")


def configure(config: pytest.Config) -> None:
    """Configure pytest (``pytest_configure``)."""
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other sets in place, and shuffle on request (``pytest_collection_modifyitems``)."""
    if config.getoption("--shuffle") is not None:
        _shuffle(items, config.getoption("--shuffle"))
    if "campaign" in config.getoption("markexpr"):
        return
    named = {path.resolve() for arg in config.args if (path := Path(arg.split("::")[0])).is_file()}
    selected = [item for item in items if _is_selected(item, config.getoption("--full"), named)]
    if len(selected) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
        items[:] = selected


def _is_selected(item: pytest.Item, with_full: bool, named_files: set[Path]) -> bool:
    if item.get_closest_marker("campaign"):
        return False
    return with_full or item.path in named_files or not item.get_closest_marker("full")


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    generator = random.Random(seed)
    groups = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    generator.shuffle(groups)
    for group in groups:
        generator.shuffle(group)
    items[:] = [item for group in groups for item in group]


def how_to_repeat(item: pytest.Item, options: list[str]) -> tuple[str, str]:
    """Return a section of a failed test's report: its title, and the command that runs this test alone."""
    marked = ["-m", "campaign"] if item.get_closest_marker("campaign") else []
    command = shlex.join([sys.executable, "-m", "pytest", *marked, *options, item.nodeid])
    return "Repeat this test alone", f"cd {shlex.quote(str(item.config.rootpath))} && {command}"
