"""How long backward waits for peers that still use an exchange buffer.

Waiting costs nothing where all ranks do the same: who is behind will come, and a step ends with its slowest rank
anyway. Going on in private memory instead costs fresh pages, a copy and, with the next buffers as late as this one, the
overlap of the rest of the pass. But a rank that does not use a chunk, or uses chunks in another order, joins its
reduction only at the end of its pass, so waiting for it is in vain. Hence: long as long as the ranks have been alike
and came, in vain once a pass at most, and ever more seldom where that happens again and again.
"""

from __future__ import annotations

import time

__all__ = ["Patience"]

SHORT_S = 0.05
FIRST_S = 0.1  # before any pass has shown how long one takes
LONGEST_S = 20.0  # far below any time-out of a group
WITHOUT_MEMORY_S = 10.0  # where private memory would go over the device's capacity
TRUSTED_PASSES = 8  # alike after one that was not, so that ranks which differ now and then wait in vain seldom
MOST_PASSES = 1024
NAP_MAX_S = 0.001


# [Note: Why no wait inside backward is without end]
# On CPU ranks it is the host that waits. A peer that does not use a chunk, or whose patience has ended, joins the
# chunk's reduction only at the end of its pass. So a wait for a reduction in the midst of backward could be one for
# ever. Until a rank's last gradient it waits for these things only:
# * an exchange buffer that chunks share: its last reduction, and peers that read it; until patience ends;
# * a buffer of the chunk's own: peers that still read the last pass's sum, who need nothing of this rank any more;
# * what all ranks gather next, where they agree on gathers, and what follows at once (the outcome of a read from a
#   disk, the gather's messages, a fence): every rank comes to its next gather, or to the end of its backward, with
#   nothing but this list in between;
# * a gather in program order ([Note: Program order]): every rank comes to it, or those that wait give up after a while;
# * a disk, its buffers, an update in its thread: these wait for no peer.
# Reductions are waited for after the last gradient. By then the ranks have agreed on what is reduced and begin it in
# one order ([Note: One order of reductions]), so who waits for the n-th waits for ranks that wait for an earlier one at
# most. A fence waits for no reduction ([Note: Fences]). On GPUs it is streams that wait; see [Note: Why no wait inside
# a pass closes a cycle]. tests/ranks/grads/test_waits.py lets patience end at every place of every rank in turn.
class Patience:
    """Of one reducer. Passes are alike when every rank had gradients of the same parameters."""

    def __init__(self) -> None:
        self._long_s = FIRST_S
        self._needed = self._alike = TRUSTED_PASSES
        self._vain_passes = 0
        self._began: float | None = None
        self._waited_s = 0.0
        self._in_vain = False

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
        return max(SHORT_S, self._long_s) if self._alike >= self._needed else SHORT_S

    def nap(self, waited_s: float) -> None:
        """Between two looks: those who are waited for may need the core, and this process's other threads the lock."""
        time.sleep(min(waited_s / 10, NAP_MAX_S))

    def waited(self, seconds: float, in_vain: bool) -> None:
        """A wait is over; after one in vain there is none in this pass."""
        self._waited_s += seconds
        self._in_vain |= in_vain

    def end_backward(self) -> None:
        """The last gradient has arrived: half of what this rank took, waits aside, is what it waits for another."""
        if self._began is not None:
            took_s = (time.monotonic() - self._began - self._waited_s) / 2
            self._long_s = min(max(took_s, self._long_s) if self._in_vain else took_s, LONGEST_S)
        self._began, self._waited_s = None, 0.0

    def compared(self, alike: bool) -> None:
        """At the end of a reduced pass: whether it was alike."""
        self._vain_passes = self._vain_passes + 1 if self._in_vain else 0
        self._alike = self._alike + 1 if alike else 0
        if self._vain_passes > 1:  # once may be a moment of the machine
            self._vain_passes = self._alike = 0
            self._needed = min(2 * self._needed, MOST_PASSES)

    def end_pass(self) -> None:
        """The next gradient belongs to another pass; whether this one came to its end or failed."""
        self._began, self._waited_s, self._in_vain = None, 0.0, False
