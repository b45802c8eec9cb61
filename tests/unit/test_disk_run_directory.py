"""A run's directory goes with its process, however that ends, and never with another's."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

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
