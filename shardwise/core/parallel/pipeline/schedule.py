"""Pipeline schedules as data: the order of actions on each rank, and their cost.

Source: 1F1B: Narayanan et al., PipeDream-Flush (arXiv 2006.09503); interleaved: Narayanan et al., Megatron-LM (arXiv
2104.04473, section 2.2); zbv: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 6; 2405.15362).
This module does not execute anything.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from typing import NamedTuple


class Kind(Enum):
    """The kind of an action. In a schedule with ``WEIGHT``, ``BACKWARD`` computes only the gradient of the stage's
    input, for which the previous stage waits."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


def rank_of_stage(stage: int, ranks: int, v_shaped: bool) -> int:
    """Return the rank of a stage: in a loop over the ranks, or, if ``v_shaped``, to the last rank and back."""
    turn, at = divmod(stage, ranks)
    return ranks - 1 - at if v_shaped and turn % 2 else at


class Action(NamedTuple):
    """A forward or backward pass of a micro-batch in a stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def read(cls, text: str) -> Action:
        """Parse the result of :meth:`__str__`.

        Raises:
            ValueError: ``text`` has another format.
        """
        match = re.fullmatch(r"(\d+)([FBW])(\d+)", text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} is no action: give a stage, F, B or W, and a micro-batch, such as '0F3'")
        return cls(Kind(match[2]), int(match[1]), int(match[3]))

    def needs(self, stages: int) -> tuple[Action, ...]:
        """Return the actions, on any rank, that must be completed first."""
        before: list[Action] = []
        if self.kind is Kind.FORWARD:
            if self.stage > 0:
                before.append(self._replace(stage=self.stage - 1))
        elif self.kind is Kind.BACKWARD:
            before.append(self._replace(kind=Kind.FORWARD))
            if self.stage < stages - 1:
                before.append(self._replace(stage=self.stage + 1))
        else:
            before.append(self._replace(kind=Kind.BACKWARD))
        return tuple(before)

    def takes(self, stages: int) -> Action | None:
        """Return the action of another stage whose result is the input, if there is one."""
        return next((each for each in self.needs(stages) if each.stage != self.stage), None)


class Message(NamedTuple):
    """The transfer of an action's result to another rank."""

    action: Action
    sender: int
    receiver: int


@dataclass(frozen=True)
class Schedule:
    """The schedule of a step.

    Attributes:
        name: name of the kind of schedule.
        stages: number of stages.
        microbatches: number of micro-batches.
        orders: the actions of a rank in order, by rank.
        v_shaped: assignment of stages to ranks, see :func:`rank_of_stage`.
    """

    name: str
    stages: int
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    v_shaped: bool = False

    @property
    def ranks(self) -> int:
        return len(self.orders)

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return rank_of_stage(stage, self.ranks, self.v_shaped)

    @cached_property
    def splits(self) -> bool:
        """Whether gradients of weights are separate actions."""
        return any(each.kind is Kind.WEIGHT for order in self.orders for each in order)

    def forward_only(self) -> Schedule:
        """Return the schedule without backward passes."""
        orders = tuple(tuple(each for each in order if each.kind is Kind.FORWARD) for order in self.orders)
        return replace(self, orders=orders)

    def most_in_flight(self, rank: int) -> int:
        """Return the maximal number of (micro-batch, stage) pairs whose activations a rank holds, from F to B."""
        return self._most(rank, Kind.FORWARD, Kind.BACKWARD)

    def most_waiting(self, rank: int) -> int:
        """Return the maximal number of such pairs for which a rank holds operands of weight gradients, from B to W."""
        return self._most(rank, Kind.BACKWARD, Kind.WEIGHT) if self.splits else 0

    def _most(self, rank: int, begin: Kind, end: Kind) -> int:
        in_flight = most = 0
        for action in self.orders[rank]:
            in_flight += (action.kind is begin) - (action.kind is end)
            most = max(most, in_flight)
        return most

    def messages(self) -> Iterator[Message]:
        """Yield the messages between ranks, in the order in which each rank receives them."""
        for rank, order in enumerate(self.orders):
            for action in order:
                source = action.takes(self.stages)
                if source is not None and self.rank_of(source.stage) != rank:
                    yield Message(source, self.rank_of(source.stage), rank)


class Span(NamedTuple):
    """The time span of an action on a rank, in any unit of time."""

    start: float
    end: float
    action: Action


def simulate(schedule: Schedule, cost: Callable[[Action], float]) -> list[list[Span]]:
    """Return the time span of each action by rank, if messages take no time.

    Raises:
        ValueError: the schedule deadlocks.
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
    """Return the idle fraction of all ranks' time, from the first start to the last end."""
    end = max((each[-1].end for each in spans if each), default=0.0)
    busy = sum(span.end - span.start for each in spans for span in each)
    return 1.0 - busy / (end * len(spans)) if end else 0.0


def expected_bubble(schedule: Schedule) -> float | None:
    """Return the bubble fraction by its formula, if F, B and W of a stage take the same time, and B as long as F and W
    in a schedule without W. ``None`` for user-defined orders and numbers of micro-batches without a formula."""
    p, m, v = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    if schedule.name == "zbv":
        usual = m >= 2 * p - 1 and schedule == make_schedule("zbv", p, 2, m)
        return (p - 1) / (6 * m + p - 1) if usual else None
    return (p - 1) / (m * v + p - 1) if v == 1 or m % p == 0 else None


def one_forward_one_backward(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Run as many forward passes as there are later stages, then alternate forward and backward passes."""
    orders = []
    for rank in range(ranks):
        first = min(ranks - rank - 1, microbatches)
        forward = [Action(Kind.FORWARD, rank, each) for each in range(microbatches)]
        backward = [Action(Kind.BACKWARD, rank, each) for each in range(microbatches)]
        orders.append(_in_turn(forward, backward, first))
    return orders


def interleaved(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Return the interleaved 1F1B schedule, in which each rank has ``chunks`` stages at a distance of ``ranks``.

    Groups of ``ranks`` micro-batches pass through the stages.
    """
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


def zero_bubble_v(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Each rank has two stages, ``s`` and ``2 * ranks - 1 - s``: a micro-batch passes down the ranks and back up, and
    its loss is on the first rank. Gradients of weights fill the bubbles. ``2 * ranks - 1`` micro-batches fill the
    pipeline; with fewer, the actions of the missing ones are left out."""
    orders = []
    f0, b0, w0, f1, b1, w1 = ((kind, chunk) for chunk in (0, 1) for kind in Kind)
    full = max(2 * ranks - 1, microbatches)
    for rank in range(ranks):
        up = ranks - rank
        steps = [f0] * (2 * up - 1) + [f1, f0] * rank + [f1, b1, w1] * up
        steps += [f0, b0, w0, f1, b1, w1] * (full - ranks - up + 1) + [b0, w0, f1, b1, w1] * (up - 1)
        steps += [b0, b1] * rank + [b0, w0] * up + [w1] * rank + [w0] * rank
        done: Counter[tuple[Kind, int]] = Counter()
        order = []
        for kind, chunk in steps:
            order.append(Action(kind, 2 * ranks - 1 - rank if chunk else rank, done[kind, chunk]))
            done[kind, chunk] += 1
        orders.append([action for action in order if action.microbatch < microbatches])
    return orders


def all_forward_first(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Run every forward pass before the first backward pass (GPipe), which never deadlocks."""
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
    "zbv": zero_bubble_v,
}
"""By name: functions that return the orders for a number of ranks, stages per rank, and micro-batches."""


@cache
def make_schedule(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Return a schedule without deadlocks, also for odd numbers of micro-batches or fewer of them than stages.

    Args:
        name: a key of :data:`SCHEDULES`.
        ranks: number of pipeline ranks.
        chunks: number of stages per rank.
        microbatches: number of micro-batches, at least 1.

    Raises:
        ValueError: the schedule does not exist, or ``chunks`` is not 1 for 1F1B, or not 2 for zbv.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: give one of {', '.join(map(repr, SCHEDULES))}")
    if name == "1f1b" and chunks != 1:
        raise ValueError(f"schedule={name!r} with {chunks} stages a rank: give 1, or schedule='interleaved'")
    if name == "zbv" and chunks != 2:
        raise ValueError(f"schedule={name!r} with {chunks} stages a rank: give 2, or schedule='interleaved'")
    for make in (SCHEDULES[name], *([all_forward_first] if name == "interleaved" else [])):
        orders = tuple(tuple(order) for order in make(ranks, chunks, microbatches))
        schedule = Schedule(name, ranks * chunks, microbatches, orders, name == "zbv")
        try:
            simulate(schedule, lambda _: 1.0)
        except ValueError:
            continue
        return schedule
    raise RuntimeError(f"{name} over {ranks} ranks x {chunks} stages with {microbatches} micro-batches; report this")


@cache
def custom_schedule(ranks: int, orders: tuple[tuple[str, ...], ...]) -> Schedule:
    """Return a user-defined zbv schedule.

    Args:
        ranks: number of pipeline ranks.
        orders: the actions of a rank in order (``"0F3"``: stage 0, forward, micro-batch 3), by rank. Stage ``s`` is on
            rank ``s`` and, after the last rank, on rank ``2 * ranks - 1 - s``.

    Raises:
        ValueError: an action is missing, duplicated or on a rank without its stage, or the order deadlocks.
    """
    read = tuple(tuple(Action.read(each) for each in order) for order in orders)
    microbatches = 1 + max((each.microbatch for order in read for each in order), default=-1)
    schedule = Schedule("zbv", 2 * ranks, microbatches, read, True)
    if len(read) != ranks:
        raise ValueError(f"a schedule of {len(read)} ranks for a pipeline of {ranks}: give the actions of each")
    for rank, order in enumerate(read):
        own = [stage for stage in range(2 * ranks) if rank_of_stage(stage, ranks, True) == rank]
        expected = Counter(Action(kind, stage, each) for kind in Kind for stage in own for each in range(microbatches))
        actual = Counter(order)
        for what, which in (
            ("lacks", expected - actual),
            ("has too many times, or not of its stages,", actual - expected),
        ):
            if which:
                some = ", ".join(map(str, list(which)[:6]))
                raise ValueError(
                    f"the schedule's rank {rank} {what} {some}{', ...' if len(which) > 6 else ''}: each of "
                    f"{microbatches} micro-batches is to have F, B and W once in its stages {own}"
                )
    simulate(schedule, lambda _: 1.0)
    sent: dict[tuple[int, int, Kind], list[Action]] = {}
    for action, sender, receiver in schedule.messages():
        sent.setdefault((sender, receiver, action.kind), []).append(action)
    for (sender, receiver, _), received in sent.items():
        made = [action for action in read[sender] if action in set(received)]
        if made != received:
            at = next(index for index, pair in enumerate(zip(made, received, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"the schedule's rank {receiver} takes {received[at]} from rank {sender} before {made[at]}, which is "
                "made first: list the actions of a rank so that it receives in the order in which its peer sends"
            )
    return schedule
