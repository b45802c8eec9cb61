"""A small session in one process, for tests of what a checkpoint writes."""

from collections.abc import Iterator

import pytest
from torch import nn

from shardwise.plan import zero
from shardwise.session import Session, build


@pytest.fixture
def session() -> Iterator[Session]:
    made = build(nn.Linear(3, 2), None, zero(3))
    yield made
    made.close()
