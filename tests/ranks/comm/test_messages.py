"""Messages from rank to rank that are waited for more than once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

from shardwise.core.comm.link import Link
from shardwise.testing import run_ranks
from tests.support.scope import Scope

INSIDE_S = 0.2
"""Until a thread that has begun to wait is inside of gloo; sooner or later, the test passes."""


class Counted:
    """A work whose waits are counted.

    Attributes:
        began: somebody waits.
        through: of each wait that has ended, whether what it is for had come.
    """

    def __init__(self, work: dist.Work) -> None:
        self._work, self.began, self.through = work, threading.Event(), list[bool]()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self.began.set()
        try:
            self._work.wait()
        finally:
            self.through.append(self._work.is_completed())


def interrupted() -> list[str]:
    """A signal comes to rank 0 while it waits, and it waits again. Rank 1 sends when the signal is there."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    told = []
    with Scope("gloo") as group:
        link, x = Link(group._gather_link.process_group, "test"), torch.zeros(3)  # type: ignore[attr-defined]
        if group.rank == 1:
            dist.recv(torch.zeros(1), src=0)
            link.send(x + 1, 0, 1, "a test").wait()
        else:
            seen = list[float]()
            message = link.receive(x, 1, 1, "a test")
            message.arrived = lambda: seen.append(float(x[0]))
            work = Counted(message._work)  # type: ignore[arg-type]
            message._work = work  # type: ignore[assignment]

            def signals() -> None:
                work.began.wait()
                time.sleep(INSIDE_S)
                os.kill(os.getpid(), signal.SIGALRM)
                dist.send(torch.zeros(1), dst=1)

            thread, before = threading.Thread(target=signals), signal.signal(signal.SIGALRM, interrupt)
            thread.start()
            try:
                message.wait()
            except KeyboardInterrupt:
                told.append("interrupted")
            thread.join()
            signal.signal(signal.SIGALRM, before)
            message.wait()
            message.wait()
            assert work.through[-1] and work.through.count(True) == 1, "a second message was waited for"
            assert seen == [1.0]
            assert x.tolist() == [1.0] * 3
        group.barrier()
    return told


def test_an_interrupt_during_a_wait_leaves_nothing_to_wait_for() -> None:
    assert run_ranks(2, interrupted) == [["interrupted"], []]
