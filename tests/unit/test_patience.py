"""How long backward waits for an exchange buffer: long where it is not in vain, once a pass where it is."""

from __future__ import annotations

import pytest

from shardwise.core.grads import patience
from shardwise.core.grads.patience import FIRST_S, LONGEST_S, SHORT_S, TRUSTED_PASSES, WITHOUT_MEMORY_S, Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    return now


def a_pass(
    waits: Patience, clock: list[float], seconds: float, alike: bool = True, waited: float = 0.0, in_vain: bool = False
) -> None:
    """``seconds`` of work from the first of three gradients to the end, and a wait; agreeing takes long, too."""
    waits.begin()
    for _ in range(2):
        clock[0] += seconds / 2
        waits.begin()
    if waited:
        clock[0] += waited
        waits.waited(waited, in_vain)
    waits.end_backward()
    clock[0] += 100.0
    waits.compared(alike)
    waits.end_pass()


def test_half_of_the_last_pass(clock: list[float]) -> None:
    waits = Patience()
    assert waits.limit_s(True) == FIRST_S and waits.limit_s(False) == WITHOUT_MEMORY_S
    a_pass(waits, clock, 6.0)
    assert waits.limit_s(True) == pytest.approx(3.0)
    a_pass(waits, clock, 8.0, waited=3.0)
    assert waits.limit_s(True) == pytest.approx(4.0), "its own work, not what it waited"
    a_pass(waits, clock, 0.001)
    assert waits.limit_s(True) == SHORT_S
    a_pass(waits, clock, 1000.0)
    assert waits.limit_s(True) == LONGEST_S


def test_once_a_pass_in_vain(clock: list[float]) -> None:
    waits = Patience()
    waits.begin()
    waits.waited(FIRST_S, in_vain=False)
    assert waits.limit_s(True) == FIRST_S
    waits.waited(FIRST_S, in_vain=True)
    assert waits.limit_s(True) == 0.0 and waits.limit_s(False) == WITHOUT_MEMORY_S
    waits.end_pass()
    a_pass(waits, clock, 6.0, waited=FIRST_S, in_vain=True)
    assert waits.limit_s(True) == pytest.approx(3.0), "too short a wait is not the end of waiting"
    a_pass(waits, clock, 1.0, waited=3.0)
    a_pass(waits, clock, 6.0, waited=3.0, in_vain=True)
    assert waits.limit_s(True) == pytest.approx(3.0), "in vain now and then"


def test_what_is_in_vain_again_and_again_becomes_seldom(clock: list[float]) -> None:
    waits, passes, in_vain = Patience(), 500, 0
    for _ in range(passes):
        long = waits.limit_s(True) > SHORT_S
        in_vain += long
        a_pass(waits, clock, 6.0, waited=3.0 if long else 0.0, in_vain=long)
    assert 6 <= in_vain <= 14


def test_a_pass_that_failed_is_no_measure(clock: list[float]) -> None:
    waits = Patience()
    a_pass(waits, clock, 6.0)
    waits.begin()
    clock[0] += 1000.0
    waits.end_pass()
    assert waits.limit_s(True) == pytest.approx(3.0)
    a_pass(waits, clock, 2.0)
    assert waits.limit_s(True) == pytest.approx(1.0)


def test_ranks_that_differ_now_and_then_are_not_waited_for(clock: list[float]) -> None:
    waits = Patience()
    a_pass(waits, clock, 6.0, alike=False)
    for _ in range(TRUSTED_PASSES):
        assert waits.limit_s(True) == SHORT_S
        a_pass(waits, clock, 6.0)
    assert waits.limit_s(True) == pytest.approx(3.0)
