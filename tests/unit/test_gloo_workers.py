"""What gloo's workers still hold when a process ends; see [Note: Workers that are late]."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from program_setup import SECONDS, surroundings

from shardwise.core.comm import release

pytestmark = pytest.mark.skipif(not release.TASKS.is_dir(), reason="the system does not tell what its threads do")


@contextmanager
def worker(work: Callable[[], object]) -> Iterator[None]:
    """A thread by the name of gloo's workers, which does ``work`` and waits then."""
    named, over = threading.Event(), threading.Event()

    def run() -> None:
        (release.TASKS / str(threading.get_native_id()) / "comm").write_text(release.WORKER)
        named.set()
        work()
        over.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    named.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_process_without_workers_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.time, "sleep", lambda _: pytest.fail("it waited"))
    assert release.resting() == {}
    release.let_workers_rest()


def test_a_worker_that_wants_the_lock_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "MOST_S", 600.0)  # a busy machine may keep it from working for long
    done: list[str] = []

    def late() -> None:
        for _ in range(20):
            time.sleep(0.005)
            sum(range(20000))
        done.append("let go")

    with worker(late):
        release.let_workers_rest()
        assert done == ["let go"]


def test_a_worker_that_waits_for_a_peer_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(release.time, "sleep", lambda seconds: looks.append(seconds))
    with worker(lambda: None):
        until = time.monotonic() + 300
        while not release.resting() and time.monotonic() < until:
            pass
        release.let_workers_rest()
    assert 0 < len(looks) <= 4


def test_one_that_never_rests_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "MOST_S", 0.1)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    with worker(busy):
        release.let_workers_rest()
        assert not stop.is_set()
        stop.set()


END = """
import sys
import torch
import torch.distributed as dist
import shardwise.core.comm
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
handles = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(20)]
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.full
def test_programs_end_right_after_a_collective(tmp_path: Path) -> None:
    """It aborted one time in three on a busy machine; what never fails is that these two end well."""
    commands = [[sys.executable, "-c", END, str(tmp_path / "meet"), str(rank)] for rank in range(2)]
    streams = {"stderr": subprocess.PIPE, "encoding": "utf-8", "env": surroundings()}
    ranks = [subprocess.Popen(command, **streams) for command in commands]
    said = [each.communicate(timeout=SECONDS)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], said
