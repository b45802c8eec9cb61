"""The lane of asynchronous saves, in one process."""

from __future__ import annotations

import threading

import pytest

from shardwise.checkpoint.snapshot import Lane


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_while_the_thread_starts_leaves_a_lane_that_saves(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    lane, real, wrote = Lane(), threading.Thread.start, list[str]()
    writing, go = threading.Event(), threading.Event()

    def write(name: str) -> None:
        writing.set()
        assert go.wait(30)
        wrote.append(name)

    def interrupted(thread: threading.Thread) -> None:
        if begun:
            real(thread)
            assert writing.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lane.start(False, lambda image: "first", lambda ranks, copied: write(copied()))
    monkeypatch.undo()
    assert lane.running == begun
    go.set()
    lane.wait_for_saves()
    lane.start(False, lambda image: "second", lambda ranks, copied: write(copied()))
    lane.close()
    assert wrote == (["first", "second"] if begun else ["second"])
