"""How long backward waits for peers that still use an exchange buffer.

Waiting costs nothing where all ranks use the same chunks: who is behind will come, and a step ends with its slowest
rank anyway. Going on in private memory instead costs fresh pages, a copy and, with the next buffers as late as this
one, the overlap of the rest of the pass. But a rank that does not use a chunk joins its reduction only at the end of
its pass, so waiting for it is in vain. Hence: long as long as the ranks have been alike, in vain once a pass at most.
"""

from __future__ import annotations

import time

__all__ = ["Patience"]

SHORT_S = 0.05
FIRST_S = 0.5  # before any pass has shown how long one takes
WITHOUT_MEMORY_S = 10.0  # where private memory would go over the device's capacity
TRUSTED_PASSES = 8  # alike after one that was not, so that ranks which differ now and then wait in vain seldom


class Patience:
    """Of one reducer. Passes are alike when every rank had gradients of the same chunks."""

    def __init__(self) -> None:
        self._long_s = FIRST_S
        self._alike = TRUSTED_PASSES
        self._in_vain = False
        self._began: float | None = None

    def begin(self) -> None:
        """A gradient has arrived; the first of a pass starts its clock."""
        if self._began is None:
            self._began = time.monotonic()

    def limit_s(self, private_fits: bool) -> float:
        """Seconds to wait now; ``private_fits``: the device has memory to go on without the buffer."""
        if not private_fits:
            return WITHOUT_MEMORY_S
        if self._in_vain:
            return 0.0
        return max(SHORT_S, self._long_s) if self._alike >= TRUSTED_PASSES else SHORT_S

    def ran_out(self) -> None:
        """It was waited in vain; in this pass not again."""
        self._in_vain = True

    def compared(self, alike: bool) -> None:
        """At the end of a reduced pass: whether it was alike."""
        self._alike = self._alike + 1 if alike else 0

    def end_pass(self) -> None:
        """Half of what this pass took is what the next waits at most."""
        if self._began is not None and not self._in_vain:
            self._long_s = (time.monotonic() - self._began) / 2
        self._began, self._in_vain = None, False
