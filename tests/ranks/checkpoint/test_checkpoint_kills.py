"""A few ranks killed at random moments of saves; ``make faults`` kills many."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.faults import kills
from tests.support.launching import forked, start
from tests.support.sets import campaign, full


def kill(count: int, seed: int, directory: str, answers: Connection) -> None:
    os.setsid()  # its ranks end with it
    found = kills.campaign(count, seed, directory)
    answers.send({"lost": found.lost, **found.counts})


def run(count: int, seed: int, directory: Path) -> dict[str, object]:
    """In a process of its own: ranks are forked, which needs one that never used torch's threads."""
    answer, answers = multiprocessing.Pipe(duplex=False)
    process = start(forked(kill, count, seed, str(directory), answers))
    answers.close()
    try:
        assert answer.poll(300), "no answer within 300 s"
        found: dict[str, object] = answer.recv()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return found


@pytest.mark.parametrize("count", [*full(6), *campaign(40)])
def test_kills_lose_nothing(tmp_path: Path, count: int) -> None:
    found = run(count, 20, tmp_path)
    assert found["lost"] == [], found
    assert found["kills"] == count and int(str(found["saves"])) > count, found
