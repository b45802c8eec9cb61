"""Eviction and prediction: Belady's rule against trying everything, and what a trace records."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.shards.policy import Trace, choose_victim, next_units


def gathers(order: list[int], capacity: int, known: bool) -> int:
    """How often something is fetched in one pass over ``order`` with room for ``capacity`` units."""
    trace = Trace(recorded=list(order) if known else [])
    held: set[int] = set()
    count = 0
    for unit in order:
        trace.use(unit)
        if unit not in held:
            if len(held) == capacity:
                held.remove(choose_victim(trace, held))
            held.add(unit)
            count += 1
    return count


def fewest(order: list[int], capacity: int) -> int:
    """The optimum by trying every eviction."""
    states = {frozenset[int](): 0}
    for unit in order:
        following: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            if unit in held:
                options = [(held, cost)]
            elif len(held) < capacity:
                options = [(held | {unit}, cost + 1)]
            else:
                options = [((held - {victim}) | {unit}, cost + 1) for victim in held]
            for state, price in options:
                following[state] = min(price, following.get(state, price))
        states = following
    return min(states.values())


orders = st.lists(st.integers(0, 4), min_size=1, max_size=10).map(lambda o: [k for k, _ in itertools.groupby(o)])


@settings(max_examples=150, deadline=None)
@given(orders, st.integers(1, 4))
def test_a_known_order_is_served_optimally(order: list[int], capacity: int) -> None:
    assert gathers(order, capacity, known=True) == fewest(order, capacity)


def lru(order: list[int], capacity: int) -> int:
    held: list[int] = []
    count = 0
    for unit in order:
        if unit in held:
            held.remove(unit)
        else:
            count += 1
            if len(held) == capacity:
                held.pop(0)
        held.append(unit)
    return count


@settings(max_examples=150, deadline=None)
@given(orders, st.integers(1, 4))
def test_an_unknown_order_is_served_least_recently_used(order: list[int], capacity: int) -> None:
    assert gathers(order, capacity, known=False) == lru(order, capacity)


def test_trace_merges_repetitions_and_predicts_what_comes() -> None:
    trace = Trace()
    for unit in (0, 0, 1, 2, 2, 1):
        trace.use(unit)
    assert trace.current == [0, 1, 2, 1] and not trace.followed and list(trace.upcoming()) == []
    trace.end_step()
    assert trace.recorded == [0, 1, 2, 1] and trace.current == [] and trace.followed
    assert next_units(trace, 5) == [0, 1, 2]
    trace.use(0)
    assert list(trace.upcoming()) == [1, 2, 1] and next_units(trace, 1) == [1] and next_units(trace, 0) == []
    trace.use(1)
    # The current unit is never its own next.
    assert next_units(trace, 3) == [2]


def test_ties_are_the_same_on_every_rank() -> None:
    trace = Trace(recorded=[0, 9])
    trace.use(0)
    assert choose_victim(trace, {5, 3, 9}) == 5  # neither 5 nor 3 comes again: the larger index
    assert choose_victim(Trace(), {5, 3, 9}) == 3
