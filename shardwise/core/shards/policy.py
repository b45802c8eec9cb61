"""What to evict and what to fetch next: pure functions of a recorded order of use.

Source: Belady's furthest-next-use rule on the order recorded in the previous step (Gemini's ``auto`` eviction and
PatrickStar do the same); least recently used where the order is not known or has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["AHEAD_BYTES", "GatherLimits", "Trace", "choose_victim", "first_that_fit", "next_units"]

# Later than any use: what the recorded step does not use again goes before all that it does.
NEVER = 1 << 60


@dataclass(frozen=True)
class GatherLimits:
    """How much may be gathered, and when.

    Attributes:
        budget_bytes: tells at each acquire how many bytes of gathered transient chunks may stay when idle.
        prefetch: units fetched ahead of use; more where they are small and sent between hosts (:func:`next_units`).
        agree: where gathers need all ranks these agree before each (``CommPlan.same_order=False``).
    """

    budget_bytes: Callable[[], int]
    prefetch: int = 0
    agree: bool = False


@dataclass
class Trace:
    """The order in which units were used: ``recorded`` in the last complete step, ``current`` in this one."""

    recorded: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    followed: bool = True
    """Whether ``current`` is so far a prefix of ``recorded``; once it is not, predictions stop until the next step."""
    recorded_ends: list[int] = field(default_factory=list)
    """Uses before the end of each backward pass of the last complete step."""
    ends: list[int] = field(default_factory=list)
    """The same of this step, so far."""

    def use(self, unit: int) -> None:
        """Note a use; immediate repetitions count once."""
        if self.current and self.current[-1] == unit:
            return
        position = len(self.current)
        if self.followed and (position >= len(self.recorded) or self.recorded[position] != unit):
            # One deviation is enough: what is predicted from a wrong place evicts what is needed next.
            self.followed = False
        self.current.append(unit)

    def end_step(self) -> None:
        """The current order becomes the prediction. A step in which nothing was used leaves the old one."""
        if self.current:
            self.expect(self.current, self.ends)
        self.restart()

    def end_pass(self) -> None:
        """A backward pass ended."""
        self.ends.append(len(self.current))

    def expect(self, order: Sequence[int], ends: Sequence[int] = ()) -> None:
        """Take ``order`` for that of the next step, with the ends of its backward passes where they are known."""
        self.recorded, self.recorded_ends = list(order), list(ends)

    def restart(self) -> None:
        """The step is made again from its beginning."""
        self.current, self.ends, self.followed = [], [], True

    def upcoming(self) -> Sequence[int]:
        """Units expected from here on; empty where the order is not known."""
        return self.recorded[len(self.current) :] if self.followed else ()

    def rest_of_pass(self) -> Sequence[int]:
        """Those of them that come before the running backward pass ends."""
        at = len(self.current)
        return self.upcoming()[: next((end - at for end in self.recorded_ends if end >= at), None)]


# [Note: When a unit may be evicted]
# When room is needed for another one (ChunkPool._make_room), and not when its use ends: what is used again at once
# would be gathered twice. Then everything idle may go but
# * what is pinned: a module that runs reads it, or a gathered() that is open has it;
# * what is fetched ahead (:func:`next_units`): it would be fetched again right away;
# * what somebody holds; see [Note: Who counts as a reader].
# Where memory is short (drop_idle) the second does not count. After an update none of them does, since the values are
# those of the step before: whoever still holds a parameter then has its graph refused (Chunk.refuse_graphs). The budget
# bounds what is idle. What is pinned counts against it and is never refused for it.
def choose_victim(trace: Trace, candidates: Collection[int]) -> int:
    """Which of the evictable ``candidates`` (not empty) goes first."""
    if len(candidates) == 1:  # as nearly always: the unit before the one that is used
        return next(iter(candidates))
    upcoming = trace.upcoming()
    if upcoming:
        position: dict[int, int] = {}
        for index, unit in enumerate(upcoming):
            position.setdefault(unit, index)
        return max(candidates, key=lambda unit: (position.get(unit, NEVER), unit))
    last_use = {unit: index for index, unit in enumerate(trace.current)}
    return min(candidates, key=lambda unit: (last_use.get(unit, -1), unit))


# Where each gather is a trip to another host, one unit's computation hides it only if the unit is large. Small
# ones are fetched further ahead: 16 MiB are little beside what a rank has, and take longer to send than most trips.
AHEAD_BYTES = 16 << 20
"""What units that travel in messages may take together when more than ``prefetch`` are fetched ahead."""


def next_units(trace: Trace, count: int, sizes: Mapping[int, int] | None = None) -> list[int]:
    """The next ``count`` distinct units after the current one, in order.

    Args:
        trace: what was recorded.
        count: 0 gives none.
        sizes: their gathered bytes, where more than ``count`` may come while all take :data:`AHEAD_BYTES` at most.
    """
    found: dict[int, None] = {}
    if count:
        here, room = trace.current[-1] if trace.current else None, AHEAD_BYTES
        for unit in trace.upcoming():
            if unit == here or unit in found:
                continue
            room -= 0 if sizes is None else sizes.get(unit, 0)
            if len(found) >= count and (sizes is None or room < 0):
                break
            found[unit] = None
    return list(found)


def first_that_fit(units: Sequence[int], sizes: Mapping[int, int], free_bytes: int) -> list[int]:
    """The first of ``units`` that there is room for together."""
    fitting = []
    for unit in units:
        free_bytes -= sizes[unit]
        if free_bytes < 0:
            break
        fitting.append(unit)
    return fitting
