"""Several jobs that save into one directory: nothing of a living one is rotated away, and each hears of the others."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from launching import forked, start
from sets import full
from torch import nn

from shardwise.build import build
from shardwise.checkpoint import owners
from shardwise.checkpoint.directory import scan
from shardwise.checkpoint.session import Checkpointer
from shardwise.plan import zero

SECONDS = 120.0


def _job(name: str, machine: str, calls: Connection) -> None:
    """Saves as often as it is asked to; answers with its warnings, or an error."""
    os.environ["TORCHELASTIC_RUN_ID"] = name
    if machine:
        owners.host_facts = lambda: {"boot": machine, "processes": "p"}  # type: ignore[assignment]
    session = build(nn.Linear(3, 2), None, zero(3))
    calls.send(os.getpid())
    for root, tag, keep in iter(calls.recv, None):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                session.checkpoints.save(root, tag, keep=keep, user_state=name)
                calls.send([str(each.message) for each in heard])
            except ValueError as error:
                calls.send(f"error: {error}")
    session.close()


class Job:
    """A process that saves."""

    def __init__(self, name: str, machine: str = "") -> None:
        self._calls, theirs = multiprocessing.Pipe()
        self.process = start(forked(_job, name, machine, theirs))
        theirs.close()
        self.pid = self._answer()

    def _answer(self) -> Any:
        assert self._calls.poll(SECONDS), f"no answer within {SECONDS} s"
        return self._calls.recv()

    def save(self, root: Path, tag: str, keep: int | None = None) -> Any:
        self._calls.send((str(root), tag, keep))
        return self._answer()

    def end(self) -> None:
        self._calls.send(None)
        self.process.join(SECONDS)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module", params=[("", ""), *full((("one", "two"),))], ids=["one machine", "two machines"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Job, Job, bool]]:
    """Two jobs, and whether they are on one machine."""
    machines: tuple[str, str] = request.param
    jobs = [Job("a", machines[0]), Job("b", machines[1])]
    yield jobs[0], jobs[1], not machines[0]
    for each in jobs:
        each.kill()


def tags(root: Path) -> list[str]:
    return sorted(each.tag for each in scan(str(root)))


def test_two_jobs_rotate_their_own_checkpoints_and_hear_of_each_other(
    tmp_path: Path, pair: tuple[Job, Job, bool]
) -> None:
    first, second, together = pair
    assert first.save(tmp_path, "a1", 2) == first.save(tmp_path, "a2", 2) == []
    heard = second.save(tmp_path, "b1", 2)
    if together:
        assert f"process {first.pid} on " in heard[0] and "of job a saves into" in heard[0]
        assert "a directory of its own" in heard[0] and tags(tmp_path) == ["a1", "a2", "b1"]
    else:  # it may as well have crashed, and this one be its restart
        assert heard == [] and tags(tmp_path) == ["a2", "b1"]
    (told,) = first.save(tmp_path, "a3", 2)
    assert f"process {second.pid} on " in told and "of job b saves into" in told
    assert (second.save(tmp_path, "b2", 2) == []) == together, "once is enough"
    for turn in range(4, 7):
        assert first.save(tmp_path, f"a{turn}", 2) == second.save(tmp_path, f"b{turn}", 2) == []
    assert tags(tmp_path) == ["a5", "a6", "b5", "b6"], "each has its own two newest"


def test_two_jobs_with_the_same_tags_are_told_apart_before_the_second_loses_more(
    tmp_path: Path, pair: tuple[Job, Job, bool]
) -> None:
    first, second, _ = pair
    assert first.save(tmp_path, "step-1") == []
    second.save(tmp_path, "step-1")
    assert len(first.save(tmp_path, "step-2")) == 1
    error = second.save(tmp_path, "step-2")
    assert error.startswith("error: rank 0 could not prepare checkpoint 'step-2'"), error
    assert f"process {first.pid} on " in error and "of job a since" in error
    assert "give each a directory of its own" in error and tags(tmp_path) == ["step-1", "step-2"]
    assert first.save(tmp_path, "step-2") == [], "its own it may replace"


def test_a_restart_goes_on_where_its_predecessor_ended(tmp_path: Path) -> None:
    """One that ended and one that was killed: neither stands in the way."""
    ended, killed, third = (Job("job") for _ in range(3))
    try:
        ended.save(tmp_path, "step-1", 2)
        ended.end()
        assert killed.save(tmp_path, "step-2", 2) == []
        killed.kill()
        for turn in (2, 3, 4):
            assert third.save(tmp_path, f"step-{turn}", 2) == []
        assert tags(tmp_path) == ["step-3", "step-4"]
    finally:
        for each in (ended, killed, third):
            each.kill()


def test_ranks_of_the_same_job_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = owners.this_process()
    own = owners.Writer(mine.host, mine.machine, mine.pid, mine.started, "job-7")
    monkeypatch.setattr(owners, "this_process", lambda: own)
    assert str(own) == f"process {os.getpid()} on {mine.host} of job job-7, which is this job itself"
    assert str(mine) == f"process {os.getpid()} on {mine.host}"


def test_a_manifest_says_who_wrote_it_and_old_ones_need_not(tmp_path: Path) -> None:
    session = build(nn.Linear(3, 2), None, zero(3))
    Checkpointer(session).save(tmp_path, "a")
    Checkpointer(session).save(tmp_path, "b", keep=1)
    (found,) = scan(str(tmp_path))
    assert found.head is not None and found.head.writer == owners.this_process()
    session.close()
    for fields in (None, [], ["host"], ["host", "m", "1", 2, "job"], {"host": 1}, ["host", "m", True, 2, "job"]):
        assert owners.Writer.read(fields) is None
    assert owners.Writer.read(owners.this_process().fields()) == owners.this_process()
    assert owners.this_process().lives()
