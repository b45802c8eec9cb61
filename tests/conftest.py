"""Shared by all tests: one thread, fixed seeds, and no rank processes left when the session ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardwise.testing import close_pools


def pytest_configure(config: pytest.Config) -> None:
    text = "campaign: the larger sets; `pytest -m campaign` (hours) selects them, nothing else does"
    config.addinivalue_line("markers", text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "campaign" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("campaign")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """The pools behind run_ranks live for the whole session."""
    torch.set_num_threads(1)
    yield
    close_pools()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
