"""Which unit to evict, and which to prefetch: pure functions of a recorded order of use.

Source: Belady's furthest-next-use rule on the order recorded in the previous step (Gemini's ``auto`` eviction and
PatrickStar do the same); least recently used if the order is not known or has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

# Later than any use: units that the recorded step does not use again are evicted first.
NEVER = 1 << 60


@dataclass(frozen=True)
class GatherLimits:
    """How much may be gathered, and when.

    Attributes:
        budget_bytes: returns at each acquire how many bytes of gathered transient chunks may stay when idle.
        prefetch: units gathered ahead of use; more if they are small and sent between hosts (:func:`next_units`).
        agree: whether ranks agree before each gather that needs all of them (``CommPlan.same_order=False``).
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
    """Whether ``current`` is a prefix of ``recorded``; if not, predictions stop until the next step."""
    recorded_ends: list[int] = field(default_factory=list)
    """Uses before the end of each backward pass of the last complete step."""
    ends: list[int] = field(default_factory=list)
    """Uses before the end of each backward pass of this step."""

    def use(self, unit: int) -> None:
        """Record a use. Immediate repetitions count once."""
        if self.current and self.current[-1] == unit:
            return
        position = len(self.current)
        if self.followed and (position >= len(self.recorded) or self.recorded[position] != unit):
            # One deviation is enough: predictions from a wrong place would evict the units that are needed next.
            self.followed = False
        self.current.append(unit)

    def end_step(self) -> None:
        """Predict the next step by this one, unless it used nothing."""
        if self.current:
            self.expect(self.current, self.ends)
        self.restart()

    def end_pass(self) -> None:
        """Note the end of a backward pass."""
        self.ends.append(len(self.current))

    def expect(self, order: Sequence[int], ends: Sequence[int] = ()) -> None:
        """Predict ``order`` for the next step, with the ends of its backward passes if they are known."""
        self.recorded, self.recorded_ends = list(order), list(ends)

    def restart(self) -> None:
        """Start the step again from its beginning."""
        self.current, self.ends, self.followed = [], [], True

    def upcoming(self) -> Sequence[int]:
        """Return the units that are expected next. Empty if the order is not known."""
        return self.recorded[len(self.current) :] if self.followed else ()

    def upcoming_in_pass(self) -> Sequence[int]:
        """Return the expected units until the end of the running backward pass."""
        at = len(self.current)
        return self.upcoming()[: next((end - at for end in self.recorded_ends if end >= at), None)]


# [Note: When a unit may be evicted]
# A unit is evicted when another unit needs room (ChunkPool._make_room), and not when its use ends: a unit that is used
# again at once would be gathered twice. Then every idle unit may be evicted except
# * pinned units: a running module reads them, or an open gathered() keeps them;
# * prefetched units (:func:`next_units`): they would be gathered again right away;
# * units whose parameters have another holder; see [Note: Who counts as a reader].
# If memory is short (drop_idle), prefetched units may be evicted, too. After an update, all of these may be evicted,
# since their values are those of the step before: graphs that still hold a parameter are refused then
# (Chunk.refuse_graphs). The budget bounds idle units. Pinned units count against it and are never refused for it.
def choose_victim(trace: Trace, candidates: Collection[int]) -> int:
    """Return which of the ``candidates`` (not empty) to evict first."""
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


# If each gather is a round trip to another host, one unit's computation hides it only if the unit is large. Small units
# are gathered further ahead: 16 MiB are little memory, and take longer to send than most round trips.
AHEAD_BYTES = 16 << 20
"""The most bytes of units sent in messages when more than ``prefetch`` are gathered ahead."""


def next_units(trace: Trace, count: int, sizes: Mapping[int, int] | None = None) -> list[int]:
    """Return the next ``count`` distinct units after the current one, in order.

    Args:
        trace: the recorded order.
        count: how many; 0 gives none.
        sizes: gathered bytes of units; if given, more than ``count`` may come while all take at most
            :data:`AHEAD_BYTES`.
    """
    units: dict[int, None] = {}
    if count:
        here, room = trace.current[-1] if trace.current else None, AHEAD_BYTES
        for unit in trace.upcoming():
            if unit == here or unit in units:
                continue
            room -= 0 if sizes is None else sizes.get(unit, 0)
            if len(units) >= count and (sizes is None or room < 0):
                break
            units[unit] = None
    return list(units)
