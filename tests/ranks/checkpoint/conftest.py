"""A small session for tests of what is written, in one process."""

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
