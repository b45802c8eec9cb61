"""Which rank does what when: the schedules of pipeline parallelism as data, and what they cost.

Source: 1F1B: Narayanan et al., PipeDream-Flush (arXiv 2006.09503); interleaved: Narayanan et al., Megatron-LM (arXiv
2104.04473, section 2.2). Nothing here runs anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

__all__ = ["SCHEDULES", "Action", "Kind", "Schedule", "Span", "bubble_fraction", "make_schedule", "simulate"]


class Kind(Enum):
    """What is done with a micro-batch in a stage."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def needs(self, stages: int) -> tuple[Action, ...]:
        """What must have been done before, in whichever rank."""
        before: list[Action] = []
        if self.kind is Kind.FORWARD:
            if self.stage > 0:
                before.append(self._replace(stage=self.stage - 1))
        else:
            before.append(self._replace(kind=Kind.FORWARD))
            if self.stage < stages - 1:
                before.append(self._replace(stage=self.stage + 1))
        return tuple(before)


@dataclass(frozen=True)
class Schedule:
    """A step.

    Attributes:
        name: of its kind.
        stages: how many; stage ``s`` is on rank ``s % ranks``.
        microbatches: how many.
        orders: by rank, its actions in order.
    """

    name: str
    stages: int
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.orders)

    def rank_of(self, stage: int) -> int:
        """Where a stage is."""
        return stage % self.ranks

    def forward_only(self) -> Schedule:
        """The same without backward passes."""
        orders = tuple(tuple(each for each in order if each.kind is Kind.FORWARD) for order in self.orders)
        return Schedule(self.name, self.stages, self.microbatches, orders)

    def most_in_flight(self, rank: int) -> int:
        """The most micro-batches, stage by stage, whose activations a rank holds at a time."""
        held = most = 0
        for action in self.orders[rank]:
            held += 1 if action.kind is Kind.FORWARD else -1
            most = max(most, held)
        return most


class Span(NamedTuple):
    """When a rank does an action, in any unit of time."""

    start: float
    end: float
    action: Action


def simulate(schedule: Schedule, cost: Callable[[Action], float]) -> list[list[Span]]:
    """By rank, when each action is made if messages take no time.

    Raises:
        ValueError: the ranks would wait for each other for ever.
    """
    ended: dict[Action, float] = {}
    waiting = [deque(order) for order in schedule.orders]
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    moved = True
    while moved:
        moved = False
        for order, done in zip(waiting, spans, strict=True):
            while order and all(each in ended for each in order[0].needs(schedule.stages)):
                action = order.popleft()
                ready = max((ended[each] for each in action.needs(schedule.stages)), default=0.0)
                start = max(ready, done[-1].end if done else 0.0)
                done.append(Span(start, start + cost(action), action))
                ended[action] = done[-1].end
                moved = True
    stuck = {rank: str(order[0]) for rank, order in enumerate(waiting) if order}
    if stuck:
        raise ValueError(f"{schedule.name} of {schedule.microbatches} micro-batches waits for ever, by rank at {stuck}")
    return spans


def bubble_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """Which part of all ranks' time, from the first start to the last end, none of their actions take."""
    end = max((each[-1].end for each in spans if each), default=0.0)
    busy = sum(span.end - span.start for each in spans for span in each)
    return 1.0 - busy / (end * len(spans)) if end else 0.0


def one_forward_one_backward(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """As many forward passes as there are stages behind, then one of each in turn."""
    orders = []
    for rank in range(ranks):
        first = min(ranks - rank - 1, microbatches)
        forward = [Action(Kind.FORWARD, rank, each) for each in range(microbatches)]
        backward = [Action(Kind.BACKWARD, rank, each) for each in range(microbatches)]
        orders.append(_in_turn(forward, backward, first))
    return orders


def interleaved(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Each rank has ``chunks`` stages, ``ranks`` apart; rounds of as many micro-batches as ranks go through all of
    them."""
    rounds = [range(start, min(start + ranks, microbatches)) for start in range(0, microbatches, ranks)]
    orders = []
    for rank in range(ranks):
        stages = [rank + ranks * chunk for chunk in range(chunks)]
        forward = [Action(Kind.FORWARD, stage, each) for turn in rounds for stage in stages for each in turn]
        backward = [Action(Kind.BACKWARD, stage, each) for turn in rounds for stage in stages[::-1] for each in turn]
        first = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, len(forward))
        orders.append(_in_turn(forward, backward, first))
    return orders


def _in_turn(forward: list[Action], backward: list[Action], first: int) -> list[Action]:
    order = forward[:first]
    for each, other in zip(forward[first:], backward, strict=False):
        order += [each, other]
    return order + backward[len(forward) - first :]


def all_forward_first(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """What never waits in a circle: every forward pass before the first backward pass (GPipe)."""
    orders = []
    for rank in range(ranks):
        stages = [rank + ranks * chunk for chunk in range(chunks)]
        forward = [Action(Kind.FORWARD, stage, each) for stage in stages for each in range(microbatches)]
        backward = [Action(Kind.BACKWARD, stage, each) for stage in stages[::-1] for each in range(microbatches)]
        orders.append(forward + backward)
    return orders


SCHEDULES: dict[str, Callable[[int, int, int], list[list[Action]]]] = {
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}
"""By name: the orders of so many ranks, stages a rank, and micro-batches."""


@cache
def make_schedule(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """A schedule that comes to its end, also with an odd number of micro-batches or fewer than there are stages.

    Args:
        name: of :data:`SCHEDULES`.
        ranks: of the pipeline.
        chunks: stages a rank.
        microbatches: at least one.

    Raises:
        ValueError: no such schedule, or ``chunks`` other than 1 for 1F1B.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: give one of {', '.join(map(repr, SCHEDULES))}")
    if name == "1f1b" and chunks != 1:
        raise ValueError(f"schedule={name!r} with {chunks} stages a rank: give 1, or schedule='interleaved'")
    for make in (SCHEDULES[name], all_forward_first):
        orders = tuple(tuple(order) for order in make(ranks, chunks, microbatches))
        schedule = Schedule(name, ranks * chunks, microbatches, orders)
        try:
            simulate(schedule, lambda _: 1.0)
        except ValueError:
            continue
        return schedule
    raise RuntimeError(f"{name} over {ranks} ranks x {chunks} stages with {microbatches} micro-batches; report this")
