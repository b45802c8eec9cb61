"""Tests of ``deferred_interrupts``: Ctrl-C is raised at the end of the outermost block, a second one at once."""

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


def test_first_interrupt_is_raised_after_the_outermost_block() -> None:
    seen = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts("all"):
        with deferred_interrupts("a part"):
            press()
            seen.append("the part ended")
        seen.append("all ended")
    assert seen == ["the part ended", "all ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_is_raised_at_once() -> None:
    seen = list[str]()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts("all"):
        press()
        seen.append("goes on")
        press()
        seen.append("not reached")
    assert seen == ["goes on"]
    with deferred_interrupts("the next"):  # no interrupt is pending
        pass


@pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_of_the_system_are_kept(kind: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, kind)
    with deferred_interrupts("all"):
        assert signal.getsignal(signal.SIGINT) == kind
