"""Parts that are ended before their end: nothing stays behind, and what was measured is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from program_setup import python, surroundings, until

ROOT = Path(__file__).resolve().parents[2]
FOREVER = """
from benchmarks.largest import Case, measure
sizes = {"device_bytes": 2**25, "host_bytes": 2**28, "sequence": 32, "micro_batch": 1, "steps": 10**9}
kind = {"update": "backward", "offload": "needed", "checkpointing": True, "dry": True}
measure(Case(10**6, "shardwise", "cpu", **sizes, **kind), 1e9)
"""
ONE_REPEAT = """
import os, sys
from benchmarks import offload
real = offload._write_json
def once(*given):
    real(*given)
    os._exit(9)
offload._write_json = once
options = "--device cpu --size tiny --micro-batch 1 --sequence 32 --repeats 2 --steps 1 --modes nothing".split()
offload.main([sys.argv[1], *options, "--json", sys.argv[2]])
"""


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _workers(pid: int) -> list[int]:
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in _children(pid)}
    return [child for child, command in commands.items() if command[1:3] == [b"-m", b"benchmarks.largest"]]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
def test_a_size_ends_with_the_process_that_measures_it() -> None:
    """A driver that is killed kills that process at once; its child holds the GPU."""
    with subprocess.Popen([sys.executable, "-c", FOREVER], cwd=ROOT, env=surroundings()) as measuring:
        try:
            until("its child", lambda: _workers(measuring.pid), measuring.poll)
            (worker,) = _workers(measuring.pid)
        finally:
            measuring.kill()
    try:
        until("the end of what it started", lambda: not _runs(worker))
    finally:
        if _runs(worker):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.full
def test_each_repeat_of_offload_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = python("-c", ONE_REPEAT, str(tmp_path), str(out))
    assert done.returncode == 9, done.stderr
    found = json.loads(out.read_text())
    assert "1 of 2 interleaved repeats" in found["text"] and "| nothing |" in found["text"]
    assert len(found["seconds"]["nothing"]["step"]) == 1
