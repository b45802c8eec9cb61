"""How long backward waits for an exchange buffer: long where it is not in vain, once a pass where it is."""

from __future__ import annotations

import pytest

from shardwise.engine import patience
from shardwise.engine.patience import FIRST_S, SHORT_S, TRUSTED_PASSES, WITHOUT_MEMORY_S, Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    return now


def a_pass(waits: Patience, clock: list[float], seconds: float, alike: bool = True) -> None:
    for _ in range(3):  # the first gradient counts
        waits.begin()
        clock[0] += seconds / 3
    waits.compared(alike)
    waits.end_pass()


def test_half_of_the_last_pass(clock: list[float]) -> None:
    waits = Patience()
    assert waits.limit_s(True) == FIRST_S and waits.limit_s(False) == WITHOUT_MEMORY_S
    a_pass(waits, clock, 6.0)
    assert waits.limit_s(True) == pytest.approx(3.0)
    a_pass(waits, clock, 0.001)
    assert waits.limit_s(True) == SHORT_S


def test_once_a_pass_in_vain(clock: list[float]) -> None:
    waits = Patience()
    a_pass(waits, clock, 6.0)
    waits.begin()
    clock[0] += 60.0
    waits.ran_out()
    assert waits.limit_s(True) == 0.0 and waits.limit_s(False) == WITHOUT_MEMORY_S
    waits.compared(True)
    waits.end_pass()
    assert waits.limit_s(True) == pytest.approx(3.0), "what was waited in vain does not make the next wait longer"


def test_ranks_that_differ_now_and_then_are_not_waited_for(clock: list[float]) -> None:
    waits = Patience()
    a_pass(waits, clock, 6.0, alike=False)
    for _ in range(TRUSTED_PASSES):
        assert waits.limit_s(True) == SHORT_S
        a_pass(waits, clock, 6.0)
    assert waits.limit_s(True) == pytest.approx(3.0)
