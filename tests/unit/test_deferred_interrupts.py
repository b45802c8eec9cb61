"""Ctrl-C waits for the end of a block; a second one does not."""

from __future__ import annotations

import signal
import threading
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


def test_an_error_in_the_block_is_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupts("all"):
        press()
        raise OSError("full")
    assert isinstance(caught.value.__context__, OSError)
    with pytest.raises(OSError, match="full"), deferred_interrupts("all"):
        raise OSError("full")


def test_a_handler_of_the_program_is_called_behind_the_block() -> None:
    seen = list[int]()
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with deferred_interrupts("all"):
        press()
        assert not seen
    assert seen == [signal.SIGINT]


@pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_the_system_handles_is_left_to_it(kind: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, kind)
    with deferred_interrupts("all"):
        assert signal.getsignal(signal.SIGINT) == kind


def test_other_threads_change_nothing() -> None:
    seen = list[object]()

    def work() -> None:
        with deferred_interrupts("all"):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
