"""A run's directory goes with its process, however that ends, and never with another's."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from disk_setup import disk_plan, holds, put

from shardwise.core.memory.disk.file import RunDirectory, remove_abandoned
from shardwise.core.memory.disk.store import DiskStore
from tests.support.launching import SECONDS, forked, start


def hold(parent: Path, told: Connection) -> None:
    """In a process of its own: says which directory it has, and keeps it until it is killed."""
    directory = RunDirectory(str(parent))
    Path(directory.path, "rank0.data").write_bytes(b"x" * 100)
    told.send(directory.path)
    threading.Event().wait()


@contextmanager
def other_process(parent: Path) -> Iterator[tuple[BaseProcess, Path]]:
    """A process that holds a directory with a named data file."""
    hear, tell = multiprocessing.Pipe(duplex=False)
    process = start(forked(hold, parent, tell))
    tell.close()
    try:
        assert hear.poll(SECONDS)
        yield process, Path(hear.recv())
    finally:
        process.kill()
        process.join()


def test_a_directory_and_its_end(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "a" / "b"))
    path = Path(directory.path)
    assert path.parent == tmp_path / "a" / "b" and re.fullmatch(r"shardwise-disk-[0-9a-f]{16}", path.name)
    assert (path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_killed_processes_are_cleaned_up_after(tmp_path: Path) -> None:
    with other_process(tmp_path) as (process, path):
        first = DiskStore(disk_plan(tmp_path))
        assert first.removed == [] and (path / "rank0.data").exists()  # it lives
        process.kill()
        process.join()
        assert (path / "rank0.data").exists()
        with DiskStore(disk_plan(tmp_path)) as second:
            assert second.removed == [path.name] and not path.exists()
            first.reserve(1, 5000)
            record = first.create("weights", 5000)
            put(first, record, 1)
            assert holds(first, record, 1)
        first.close()
    assert list(tmp_path.iterdir()) == []


def write_without_end(parent: Path, told: Connection) -> None:
    """In a process of its own: says how many names the data file has, and writes until it is killed."""
    store = DiskStore(disk_plan(parent, block_bytes=4096, threads=2))
    store.reserve(1, 2**24)
    record, buffer = store.create("weights", 2**24), store.buffer(2**24)
    store.write(record, buffer).wait()
    told.send(os.fstat(store._file.fd).st_nlink)
    while True:
        store.write(record, buffer).wait()


def test_a_store_killed_in_a_transfer_leaves_only_an_empty_directory(tmp_path: Path) -> None:
    hear, tell = multiprocessing.Pipe(duplex=False)
    process = start(forked(write_without_end, tmp_path, tell))
    tell.close()
    try:
        assert hear.poll(SECONDS) and hear.recv() == 0  # the system takes the space back by itself
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert [path.name for path in left.iterdir()] == ["lock"]
    DiskStore(disk_plan(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    name = "shardwise-disk-0123456789abcdef"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("")
    (tmp_path / name).symlink_to(elsewhere)
    kept = tmp_path / name.replace("0", "1", 1)
    kept.mkdir()
    for file in ("lock", "rank0.data", "thesis.tex"):
        (kept / file).write_text("")
    for other in ("shardwise-disk-0123", "shardwise-0123456789abcdef", name + ".bak"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "lock").write_text("")
    (tmp_path / name.replace("0", "2", 1)).write_text("a file")
    before = set(tmp_path.rglob("*"))
    remove_abandoned(str(tmp_path))
    assert before - set(tmp_path.rglob("*")) == {kept / "lock", kept / "rank0.data"}


def test_half_made_directories_are_removed(tmp_path: Path) -> None:
    names = [f"shardwise-disk-{digit * 16}" for digit in "012"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / names[1] / "lock").write_text("")
    (tmp_path / names[2] / "lock").write_text("process 1")
    assert remove_abandoned(str(tmp_path)) == names[2:]  # the others may have been a living neighbour's first moments
    assert list(tmp_path.iterdir()) == []


def test_a_maker_that_lost_its_directory_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that starts at the wrong moment takes the new directory for an abandoned one: both orders."""
    real_open, real_flock, steals = os.open, fcntl.flock, ["before the lock file", "before the lock"]

    def opening(path: str, *rest: int, **named: int) -> int:
        if str(path).endswith("lock") and len(steals) == 2 and rest[0] & os.O_CREAT:
            steals.pop()
            os.rmdir(os.path.dirname(path))
        return real_open(path, *rest, **named)

    def locking(fd: int, how: int) -> None:
        if len(steals) == 1:
            steals.pop()
            assert remove_abandoned(str(tmp_path)) == []
            assert list(tmp_path.iterdir()) == []
        real_flock(fd, how)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(fcntl, "flock", locking)
    directory = RunDirectory(str(tmp_path))
    assert not steals and [str(path) for path in tmp_path.iterdir()] == [directory.path]
    assert remove_abandoned(str(tmp_path)) == []
    directory.close()


def test_no_locks_no_cleaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    first, second = RunDirectory(str(tmp_path)), RunDirectory(str(tmp_path))
    assert second.removed == [] and len(list(tmp_path.iterdir())) == 2
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
