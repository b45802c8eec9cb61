"""Patience that ends at a chosen place, and short patience."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from shardwise.core.comm import Buffer
from shardwise.core.grads import reducer as waits
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer

QUICK_S = 0.004
"""Peers of an impatient rank wait in vain; here not for long."""


class Impatient:
    """Stands before one reducer's exchange buffers: lets patience end at a place of the caller's choice.

    Attributes:
        at: in a pass, the first time that backward asks for a buffer and gets none; ``None``: nothing is changed.
        rest: so at all later times of that pass, too.
        seen: how often it has asked in this pass.
        fired: how often it got none for that reason.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self._take = reducer, reducer._take_bucket
        self.at: int | None = None
        self.rest = False
        self.seen = self.fired = 0
        reducer._take_bucket = self._asked  # type: ignore[method-assign]

    def arm(self, at: int | None, rest: bool) -> None:
        """For the next pass."""
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
    """Inside, backward waits :data:`QUICK_S` for a buffer."""
    with mock.patch.multiple(waits, SHORT_S=QUICK_S, FIRST_S=QUICK_S, LONGEST_S=QUICK_S):
        yield
