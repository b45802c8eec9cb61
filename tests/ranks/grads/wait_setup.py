"""Wait policies for tests: patience that ends at a chosen place, and short patience."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from shardwise.core.comm import Buffer
from shardwise.core.grads import reducer as waits
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer

QUICK_S = 0.004
"""Peers of an impatient rank wait without success; here they give up soon."""


class Impatient:
    """Wraps one reducer's exchange buffers, and ends its patience where the caller says.

    Attributes:
        at: the first request of backward in a pass that gets no buffer; ``None`` changes nothing.
        rest: whether all later requests of that pass get none, too.
        seen: how many requests there were in this pass.
        fired: how many of them got no buffer for that reason.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self._take = reducer, reducer._take_bucket
        self.at: int | None = None
        self.rest = False
        self.seen = self.fired = 0
        reducer._take_bucket = self._asked  # type: ignore[method-assign]

    def arm(self, at: int | None, rest: bool) -> None:
        """Set the request for the next pass."""
        self.at, self.rest, self.seen, self.fired = at, rest, 0, 0

    def _asked(self, state: ChunkGrads) -> Buffer | None:
        seen, self.seen = self.seen, self.seen + 1
        if self.at is None or seen < self.at or (seen > self.at and not self.rest):
            return self._take(state)
        self.fired += 1
        self._reducer._waits.waited(0.0, timed_out=True)
        return None


@contextlib.contextmanager
def quick_patience() -> Iterator[None]:
    """Make backward wait :data:`QUICK_S` for a buffer inside this context."""
    with mock.patch.multiple(waits, SHORT_S=QUICK_S, FIRST_S=QUICK_S, LONGEST_S=QUICK_S):
        yield
