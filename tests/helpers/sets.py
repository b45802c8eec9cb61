"""Rows of ``pytest.mark.parametrize`` that belong to a larger set of tests than the others. See CONTRIBUTING.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def _marked(mark: pytest.MarkDecorator, rows: Iterable[Any]) -> list[Any]:
    marked = []
    for row in rows:
        if isinstance(row, type(pytest.param())):
            marked.append(row._replace(marks=[*row.marks, mark]))
        else:
            marked.append(pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark))
    return marked


def full(*rows: Any) -> list[Any]:
    """Rows that only ``make test-full`` runs."""
    return _marked(pytest.mark.full, rows)


def campaign(*rows: Any) -> list[Any]:
    """Rows that only ``make campaign`` runs."""
    return _marked(pytest.mark.campaign, rows)
