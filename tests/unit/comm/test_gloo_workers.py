"""Test of ``wait_for_idle_workers``, which waits for gloo's worker threads at exit; see [Note: Workers that are
late].
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardwise.core.comm import release

pytestmark = pytest.mark.skipif(not release.TASKS.is_dir(), reason="the system does not tell what its threads do")


@contextmanager
def worker(work: Callable[[], object]) -> Iterator[None]:
    """Run a thread with the name of gloo's workers that does ``work`` and then waits."""
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


def test_running_workers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "MOST_S", 600.0)  # longer than a busy machine can delay the worker
    done: list[str] = []

    def late() -> None:
        for _ in range(20):
            time.sleep(0.005)
            sum(range(20000))
        done.append("let go")

    with worker(late):
        release.wait_for_idle_workers()
        assert done == ["let go"]
