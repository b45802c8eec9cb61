"""Ranks that die, leave, do not come or go astray: named, in seconds, with the operation."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scope import Scope

from shardwise.comm import PeerError
from shardwise.testing import run_ranks

# Failures. These ranks are processes of their own, since a pool ends all its ranks soon after the first failure.


def _rank(fn: Callable[[], str], store: str, rank: int, size: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    connection.send(fn())
    os._exit(0)


def survivors(fn: Callable[[], str], size: int, tmp_path: Path) -> list[str | None]:
    """What ``fn`` returned on each rank; ``None`` where the rank died first."""
    context = multiprocessing.get_context("forkserver")
    ends, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(fn, str(tmp_path / "store"), rank, size, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    told: list[str | None] = []
    try:
        for end in ends:
            assert end.poll(40.0), "a rank neither finished nor died"
            try:
                told.append(end.recv())
            except EOFError:
                told.append(None)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return told


def _death(kind: str, operation: str) -> str:
    scope = Scope(kind)
    group = scope.group
    (full,) = group.buffers([(group.size * 1000, torch.float32)])
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        if operation == "fence":
            group.barrier()
        else:
            handle = group.all_reduce(full, 1.0)
            handle.wait()
    except PeerError as error:
        return f"{time.monotonic() - started:.3f} {error}"
    return "0 nothing was noticed"


def death_in_shared_reduction() -> str:
    return _death("shared", "all_reduce")


def death_in_shared_barrier() -> str:
    return _death("shared", "fence")


def death_in_gloo_reduction() -> str:
    return _death("gloo", "all_reduce")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (
            death_in_shared_reduction,
            ("all_reduce of buffer 0 (3000 x torch.float32), sequence 1", "rank 1 (process", "died"),
        ),
        (death_in_shared_barrier, ("barrier number 2", "rank 1 (process", "died")),
        (death_in_gloo_reduction, ("all_reduce of 3000 x torch.float32", "rank 1")),
    ],
)
def test_a_dead_rank_is_named_in_seconds(fn: Callable[[], str], words: tuple[str, ...], tmp_path: Path) -> None:
    told = survivors(fn, 3, tmp_path)
    assert told[1] is None
    assert all(told[rank] is not None for rank in (0, 2))
    # One survivor may learn of the death through the other, which failed first.
    first = next(text for text in (told[0], told[2]) if text is not None and words[-1] in text)
    assert all(word in first for word in words)
    assert all(float(text.split()[0]) < 10.0 for text in (told[0], told[2]) if text is not None)


def late() -> str:
    scope = Scope("shared", timeout_s=1.0)
    (full,) = scope.group.buffers([(4, torch.float32)])
    try:
        if scope.group.rank == 0:
            scope.group.all_reduce(full, 1.0).wait()
    except PeerError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def left() -> str:
    scope = Scope("shared")
    told = ""
    try:
        if scope.group.rank == 0:
            scope.group.fence()
        else:
            scope.group.close()
    except PeerError as error:
        told = str(error)
    dist.barrier()
    return told


def astray() -> str:
    scope = Scope("shared")
    told = ""
    try:
        scope.group.fence() if scope.group.rank else scope.group.exchange([1.0, 2.0])
    except PeerError as error:
        told = str(error)
    dist.barrier()
    return told


def other_reduction() -> str:
    scope = Scope("shared")
    (full,) = scope.group.buffers([(4, torch.float32)])
    told = ""
    try:
        if scope.group.rank:
            scope.group.reduce_scatter(torch.empty(2), full, 1.0).wait()
        else:
            scope.group.all_reduce(full, 1.0).wait()
    except PeerError as error:
        told = str(error)
    dist.barrier()
    return told


def test_a_rank_that_does_not_come_is_named() -> None:
    text = run_ranks(2, late)[0]
    assert "rank 1 is running but has not come" in text and "time-out is 1 s" in text


def test_a_rank_that_left_is_named() -> None:
    assert "rank 1 has closed the group" in run_ranks(2, left)[0]


def test_ranks_at_different_operations_are_told() -> None:
    for text in run_ranks(2, astray):
        assert "exchange (2 values)" in text and "fence (0 values)" in text
    first, second = run_ranks(2, other_reduction)
    assert "rank 0: all_reduce of 4, rank 1: reduce_scatter of 4 elements" in first and "rank 0: all_reduce" in second
