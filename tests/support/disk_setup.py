"""Setup for tests of the disk tier: a plan, an I/O queue that records requests and can fail, and real small disks."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.memory.disk.io_threads import Request, RequestQueue, ThreadQueue, TransferFunction
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.plan import DiskPlan

KIB, MIB = 2**10, 2**20
SIZES = (0, 1, 7, 8, 9, 4095, 4096, 4097, 16411, MIB - 1, MIB, MIB + 1, 3 * MIB + 104729)


def disk_plan(directory: str | Path, **changes: Any) -> DiskPlan:
    """Return a plan with the published defaults and small changes."""
    fields: dict[str, Any] = {
        "directory": str(directory),
        "block_bytes": MIB,
        "queue_depth": 8,
        "threads": 1,
        "single_submit": False,
        "overlap_events": True,
        "state_buffers": 3,
        "param_buffers": 2,
    }
    return DiskPlan(**(fields | changes))


@functools.cache
def _noise() -> Tensor:
    return torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def pattern(nbytes: int, seed: int) -> Tensor:
    """Return bytes that depend on the seed only: a slice of some noise. Read-only."""
    start = (seed * 104_729) % 1_000_003
    assert start + nbytes <= 8 * MIB
    return _noise()[start : start + nbytes]


def put(store: DiskStore, record: Record, seed: int, commit: bool = True) -> None:
    """Write the pattern of ``seed``, followed by a different pattern."""
    buffer = store.buffer(record.nbytes)
    buffer.copy_(pattern(buffer.numel(), seed + 1_000_000))
    buffer[: record.nbytes] = pattern(record.nbytes, seed)
    try:
        store.write(record, buffer).wait()
    finally:
        store.give(buffer)
    if commit:
        store.commit()


def holds(store: DiskStore, record: Record, seed: int, newest: bool = False) -> bool:
    """Return whether the record has the pattern of ``seed``."""
    buffer = store.buffer(record.nbytes).fill_(0xEE)
    try:
        store.read(record, buffer, newest=newest).wait()
        return torch.equal(buffer[: record.nbytes], pattern(record.nbytes, seed))
    finally:
        store.give(buffer)


class Watched:
    """Forwards requests to a real queue and records them; ``fail_at`` makes the n-th request (from 0) fail.

    ``gate`` delays all results until it is set.
    """

    def __init__(self, inner: RequestQueue, log: Log) -> None:
        self.inner, self.log = inner, log

    def submit(self, requests: Sequence[Request]) -> None:
        with self.log.lock:
            self.log.submissions.append(len(requests))
            self.log.requests.extend(requests)
            self.log.threads.update([threading.get_ident()])
            self.log.in_flight += len(requests)
            self.log.most_in_flight = max(self.log.most_in_flight, self.log.in_flight)
        self.inner.submit(requests)

    def reap(self, at_least: int) -> list[tuple[Request, int]]:
        assert self.log.gate.wait(120)
        if self.log.break_at == len(self.log.requests):
            raise ZeroDivisionError("broken on purpose")
        done = self.inner.reap(at_least)
        with self.log.lock:
            self.log.in_flight -= len(done)
            first = {id(r): n for n, r in enumerate(self.log.requests)}
            return [(r, self.log.results.pop(first[id(r)], result)) for r, result in done]

    def close(self) -> None:
        self.inner.close()
        self.log.closed += 1


class Log:
    """Records of all queues of one store. ``results`` replaces the result of the n-th request (from 0)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.results: dict[int, int] = {}
        self.break_at = -1
        self.requests: list[Request] = []
        self.submissions: list[int] = []
        self.threads: set[int] = set()
        self.depths: list[int] = []
        self.in_flight = self.most_in_flight = self.closed = 0

    def queue(self, depth: int, transfer: TransferFunction) -> Watched:
        self.depths.append(depth)
        return Watched(ThreadQueue(depth, transfer), self)

    def fail_next(self, number: int = errno.EIO, after: int = 0) -> None:
        """Let the request after the next ``after`` ones fail with this errno."""
        self.results[len(self.requests) + after] = -number


@contextlib.contextmanager
def small_disk(tmp_path: Path, nbytes: int) -> Iterator[Path]:
    """Mount an ext4 file system of ``nbytes`` on a loop device; skip the test where this process is not allowed to."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    image.touch()
    os.truncate(image, nbytes)
    folder.mkdir()
    make, mount = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], ["mount", "-o", "loop", image, folder]
    try:
        for command in (make, mount):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make a file system here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
