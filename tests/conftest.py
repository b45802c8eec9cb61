"""Shared by all tests: one thread, fixed seeds, and no rank processes left when the session ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardwise.testing import close_pools


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """The pools behind run_ranks live for the whole session."""
    torch.set_num_threads(1)
    yield
    close_pools()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
