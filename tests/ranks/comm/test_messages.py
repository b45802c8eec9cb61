"""Messages from rank to rank that are waited for more than once."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist
from scope import Scope

from shardwise.comm import PeerError
from shardwise.comm.link import Link
from shardwise.testing import run_ranks

LATE_S = 0.5


def interrupted() -> list[str]:
    """Rank 1 sends late; a signal comes to rank 0 while it waits, and it waits again."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    told = []
    with Scope("gloo", 10.0) as group:
        link, x = Link(group._gather_link._process_group, "test"), torch.zeros(3)  # type: ignore[attr-defined]
        if group.rank == 1:
            time.sleep(2 * LATE_S)
            link.send(x + 1, 0, 1, "a test").wait()
        else:
            seen = list[float]()
            message = link.receive(x, 1, 1, "a test")
            message.arrived = lambda: seen.append(float(x[0]))
            before = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, LATE_S)
            try:
                message.wait()
            except KeyboardInterrupt:
                told.append("interrupted")
            finally:
                signal.signal(signal.SIGALRM, before)
            start = time.monotonic()
            message.wait()
            message.wait()
            assert time.monotonic() - start < 5.0
            assert seen == [1.0]
            assert x.tolist() == [1.0] * 3
        group.barrier()
    return told


def test_an_interrupt_during_a_wait_leaves_nothing_to_wait_for() -> None:
    assert run_ranks(2, interrupted) == [["interrupted"], []]


def lost() -> list[str]:
    """Nobody sends."""
    told = []
    with Scope("gloo", 1.0) as group:
        if group.rank == 0:
            link = Link(group._gather_link._process_group, "test")  # type: ignore[attr-defined]
            message = link.receive(torch.zeros(3), 1, 1, "a test")
            for _ in range(2):
                try:
                    message.wait()
                except PeerError as error:
                    told.append(str(error)[:6])
        else:
            time.sleep(3.0)
    dist.barrier()
    return told


def test_what_failed_fails_again() -> None:
    assert run_ranks(2, lost) == [["a test"] * 2, []]
