"""Which rank does what when: the schedules of pipeline parallelism as data, and what they cost.

Source: 1F1B: Narayanan et al., PipeDream-Flush (arXiv 2006.09503); interleaved: Narayanan et al., Megatron-LM (arXiv
2104.04473, section 2.2); zbv: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 6; 2405.15362).
Nothing here runs anything.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from typing import NamedTuple

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Message",
    "Schedule",
    "Span",
    "bubble_fraction",
    "expected_bubble",
    "given_schedule",
    "make_schedule",
    "rank_of_stage",
    "simulate",
]


class Kind(Enum):
    """What is done with a micro-batch in a stage. Where a schedule has ``WEIGHT``, ``BACKWARD`` makes the gradient of
    the stage's input alone, which is what the stage before waits for."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


def rank_of_stage(stage: int, ranks: int, v_shaped: bool) -> int:
    """Where a stage is: the ranks in turn, or, ``v_shaped``, down to the last rank and from there back up."""
    turn, at = divmod(stage, ranks)
    return ranks - 1 - at if v_shaped and turn % 2 else at


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def read(cls, text: str) -> Action:
        """What :meth:`__str__` wrote.

        Raises:
            ValueError: it is something else.
        """
        found = re.fullmatch(r"(\d+)([FBW])(\d+)", text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(f"{text!r} is no action: give a stage, F, B or W, and a micro-batch, such as '0F3'")
        return cls(Kind(found[2]), int(found[1]), int(found[3]))

    def needs(self, stages: int) -> tuple[Action, ...]:
        """What must have been done before, in whichever rank."""
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
        """Whose result it starts from, if another stage makes that."""
        return next((each for each in self.needs(stages) if each.stage != self.stage), None)


class Message(NamedTuple):
    """What one rank's action makes for another rank."""

    action: Action
    sender: int
    receiver: int


@dataclass(frozen=True)
class Schedule:
    """A step.

    Attributes:
        name: of its kind.
        stages: how many.
        microbatches: how many.
        orders: by rank, its actions in order.
        v_shaped: where stages are, see :func:`rank_of_stage`.
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
        """Where a stage is."""
        return rank_of_stage(stage, self.ranks, self.v_shaped)

    @cached_property
    def splits(self) -> bool:
        """Whether gradients of weights are actions of their own."""
        return any(each.kind is Kind.WEIGHT for order in self.orders for each in order)

    def forward_only(self) -> Schedule:
        """The same without backward passes."""
        orders = tuple(tuple(each for each in order if each.kind is Kind.FORWARD) for order in self.orders)
        return replace(self, orders=orders)

    def most_in_flight(self, rank: int) -> int:
        """The most micro-batches, stage by stage, whose activations a rank holds at a time: from F to B."""
        return self._most(rank, Kind.FORWARD, Kind.BACKWARD)

    def most_waiting(self, rank: int) -> int:
        """The most, stage by stage, of which it holds what gradients of weights are made of: from B to W."""
        return self._most(rank, Kind.BACKWARD, Kind.WEIGHT) if self.splits else 0

    def _most(self, rank: int, begin: Kind, end: Kind) -> int:
        held = most = 0
        for action in self.orders[rank]:
            held += (action.kind is begin) - (action.kind is end)
            most = max(most, held)
        return most

    def messages(self) -> Iterator[Message]:
        """What goes from rank to rank, in the order in which each rank takes it."""
        for rank, order in enumerate(self.orders):
            for action in order:
                taken = action.takes(self.stages)
                if taken is not None and self.rank_of(taken.stage) != rank:
                    yield Message(taken, self.rank_of(taken.stage), rank)


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


def expected_bubble(schedule: Schedule) -> float | None:
    """The same by its formula, where F, B and W of a stage take as long, and B as F and W where there is no W; ``None``
    for numbers of micro-batches, and orders of somebody's own, for which there is none."""
    p, m, v = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    if schedule.name == "zbv":
        usual = m >= 2 * p - 1 and schedule == make_schedule("zbv", p, 2, m)
        return (p - 1) / (6 * m + p - 1) if usual else None
    return (p - 1) / (m * v + p - 1) if v == 1 or m % p == 0 else None


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


def zero_bubble_v(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Two stages a rank, ``s`` and ``2 * ranks - 1 - s``: a micro-batch goes down the ranks and back up, and its loss
    is on the first. Gradients of weights fill what would be waited. What fills the pipeline are ``2 * ranks - 1``
    micro-batches; where there are fewer the others are left out."""
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
    "zbv": zero_bubble_v,
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
        ValueError: no such schedule, or ``chunks`` other than 1 for 1F1B, or 2 for zbv.
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
def given_schedule(ranks: int, orders: tuple[tuple[str, ...], ...]) -> Schedule:
    """A zbv schedule of somebody's own.

    Args:
        ranks: of the pipeline.
        orders: by rank, its actions (``"0F3"``: stage 0, forward, micro-batch 3) in order. Stage ``s`` is on rank ``s``
            and, from the last rank on, on rank ``2 * ranks - 1 - s``.

    Raises:
        ValueError: something is missing, there twice, on another rank than its stage, or would be waited for for ever.
    """
    read = tuple(tuple(Action.read(each) for each in order) for order in orders)
    microbatches = 1 + max((each.microbatch for order in read for each in order), default=-1)
    schedule = Schedule("zbv", 2 * ranks, microbatches, read, True)
    if len(read) != ranks:
        raise ValueError(f"a schedule of {len(read)} ranks for a pipeline of {ranks}: give the actions of each")
    for rank, order in enumerate(read):
        own = [stage for stage in range(2 * ranks) if rank_of_stage(stage, ranks, True) == rank]
        wanted = Counter(Action(kind, stage, each) for kind in Kind for stage in own for each in range(microbatches))
        found = Counter(order)
        for what, which in (("lacks", wanted - found), ("has too many times, or not of its stages,", found - wanted)):
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
    for (sender, receiver, _), taken in sent.items():
        made = [action for action in read[sender] if action in set(taken)]
        if made != taken:
            at = next(index for index, pair in enumerate(zip(made, taken, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"the schedule's rank {receiver} takes {taken[at]} from rank {sender} before {made[at]}, which is made "
                "first: give an order in which each rank takes what another sends in the order in which it was made"
            )
    return schedule
