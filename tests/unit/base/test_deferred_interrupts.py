"""Ctrl-C waits for the end of a block; a second one does not."""

import signal
from collections.abc import Iterator

import pytest

from shardwise.core.base.interrupts import deferred_interrupts


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_one_waits_for_the_end_of_the_outermost_block() -> None:
    seen = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts("all"):
        with deferred_interrupts("a part"):
            press()
            seen.append("the part ended")
        seen.append("all ended")
    assert seen == ["the part ended", "all ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_is_raised_at_once() -> None:
    seen = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts("all"):
        press()
        seen.append("goes on")
        press()
        seen.append("not reached")
    assert seen == ["goes on"]
    with deferred_interrupts("the next"):  # nothing is left of it
        pass


@pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_the_system_handles_is_left_to_it(kind: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, kind)
    with deferred_interrupts("all"):
        assert signal.getsignal(signal.SIGINT) == kind
