"""``accumulate`` of accelerate, where a backward pass fails."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.session import Session

__all__ = ["Accumulating"]


class Accumulating:
    """Of an accelerator. accelerate counts blocks of ``accumulate``, and makes an update in each n-th; the blocks of a
    step whose gradients were dropped since one of its passes failed are of no update."""

    step: int
    gradient_accumulation_steps: int
    gradient_state: Any
    _in_block = False

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As accelerate's."""
        with super().accumulate(*models):  # type: ignore[misc]
            self._in_block = True
            try:
                yield
            finally:
                self._in_block = False

    def _watch_passes(self, session: Session) -> None:
        found = weakref.WeakMethod(self._passes_lost)  # a session lives as long as its model, and longer than this

        def lost() -> None:
            tell = found()
            if tell is not None:
                tell()

        session.events.passes_lost.listen(lost)

    def _passes_lost(self) -> None:
        """The program makes all passes of the step again. It is noticed in the first of them, or in ``zero_grad()``."""
        count = self.gradient_accumulation_steps
        if self.step:  # 0: the last batch of a loader, which is always one of an update
            self.step -= (self.step - 1) % count + 1 - self._in_block
            if self._in_block:
                self.gradient_state._set_sync_gradients(self.step % count == 0)
