"""How long backward waits for a bucket: half a pass, once in vain in a pass, and shortly after that."""

from __future__ import annotations

import pytest

from shardwise.core.grads import reducer
from shardwise.core.grads.reducer import DIFFERENT, FIRST_S, LONGEST_S, SHORT_S, WITHOUT_MEMORY_S, WaitPolicy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(reducer.time, "monotonic", lambda: now[0])
    return now


def a_pass(
    waits: WaitPolicy, clock: list[float], seconds: float, same: bool = True, waited: float = 0.0, in_vain: bool = False
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
    waits.compared(same)
    waits.end_pass()


def test_half_of_the_last_pass(clock: list[float]) -> None:
    waits = WaitPolicy()
    assert waits.limit_s(True) == FIRST_S and waits.limit_s(False) == WITHOUT_MEMORY_S
    a_pass(waits, clock, 6.0)
    assert waits.limit_s(True) == pytest.approx(3.0)
    a_pass(waits, clock, 8.0, waited=3.0)
    assert waits.limit_s(True) == pytest.approx(4.0), "its own work, not its waits"
    a_pass(waits, clock, 0.001)
    assert waits.limit_s(True) == SHORT_S
    a_pass(waits, clock, 1000.0)
    assert waits.limit_s(True) == LONGEST_S
    waits.begin()
    clock[0] += 5.0
    waits.end_pass()  # it failed
    assert waits.limit_s(True) == LONGEST_S


def test_short_after_a_wait_in_vain_or_where_ranks_differ(clock: list[float]) -> None:
    waits = WaitPolicy()
    waits.begin()
    waits.waited(FIRST_S, in_vain=False)
    assert waits.limit_s(True) == FIRST_S
    waits.waited(FIRST_S, in_vain=True)
    assert waits.limit_s(True) == 0.0 and waits.limit_s(False) == WITHOUT_MEMORY_S
    waits.end_pass()
    for passes, changes in ((2, {"waited": 3.0, "in_vain": True}), (DIFFERENT, {"same": False})):
        a_pass(waits, clock, 6.0, **changes)
        for _ in range(passes):
            assert waits.limit_s(True) == SHORT_S
            a_pass(waits, clock, 6.0, waited=SHORT_S, in_vain=True)
        assert waits.limit_s(True) == pytest.approx(3.0)
