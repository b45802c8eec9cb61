"""Ranks that die, leave, do not come or go astray: named, in seconds, with the operation."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import ModelId, PeerError
from shardwise.testing import run_ranks
from tests.support.launching import forked, start
from tests.support.scope import Scope
from tests.support.sets import full

# Failures. These ranks are processes of their own, since a pool ends all its ranks soon after the first failure.


def _rank(fn: Callable[[], str], store: str, rank: int, size: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    connection.send(fn())
    os._exit(0)


def survivors(fn: Callable[[], str], size: int, tmp_path: Path) -> list[str | None]:
    """What ``fn`` returned on each rank; ``None`` where the rank died first."""
    ends, processes = [], []
    for rank in range(size):
        ours, theirs = multiprocessing.Pipe()
        processes.append(start(forked(_rank, fn, str(tmp_path / "store"), rank, size, theirs)))
        theirs.close()
        ends.append(ours)
    told: list[str | None] = []
    try:
        for end in ends:
            assert end.poll(300.0), "a rank neither finished nor died"
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
    scope = Scope(kind, 600.0)  # longer than the caller waits: a death is told, not waited for
    group = scope.group
    (full,) = group.buffers([(group.size * 1000, torch.float32)])
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if operation == "fence":
            group.barrier()
        elif operation == "meeting":
            group.exchange([0.0], "a test")
        else:
            handle = group.all_reduce(full, 1.0)
            handle.wait()
    except PeerError as error:
        return str(error)
    return "nothing was noticed"


def test_who_dies_instead_of_meeting_is_missed_by_all(tmp_path: Path) -> None:
    first, dead, last = survivors(partial(_death, "gloo", "meeting"), 3, tmp_path)
    assert dead is None
    for rank, text in ((0, first), (2, last)):
        assert text is not None and f"exchange of a test in group 'test' (rank {rank} of 3) failed" in text


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (
            partial(_death, "shared", "all_reduce"),
            ("all_reduce of buffer 0 (3000 x torch.float32), sequence 1", "rank 1 (process", "died"),
        ),
        *full(
            (partial(_death, "shared", "fence"), ("barrier number 3", "rank 1 (process", "died")),
            (partial(_death, "gloo", "all_reduce"), ("all_reduce of 3000 x torch.float32", "rank 1")),
        ),
    ],
)
def test_a_dead_rank_is_named(fn: Callable[[], str], words: tuple[str, ...], tmp_path: Path) -> None:
    """Long before the group would give up waiting."""
    told = survivors(fn, 3, tmp_path)
    assert told[1] is None
    assert all(told[rank] is not None for rank in (0, 2))
    # One survivor may learn of the death through the other, which failed first.
    first = next(text for text in (told[0], told[2]) if text is not None and words[-1] in text)
    assert all(word in first for word in words)


MEETINGS: dict[str, Callable[[Any, Any], Any]] = {
    "left": lambda group, _: group.close() if group.rank else group.fence(),
    "phases": lambda group, _: group.fence("after an update" if group.rank else "before an update"),
    "operations": lambda group, _: group.fence() if group.rank else group.exchange([1.0, 2.0]),
    "reductions": lambda group, full: (
        group.reduce_scatter(torch.empty(2), full, 1.0) if group.rank else group.all_reduce(full, 1.0)
    ).wait(),
}


def astray(name: str) -> str:
    scope, told = Scope("shared"), ""
    (full,) = scope.group.buffers([(4, torch.float32)])
    try:
        MEETINGS[name](scope.group, full)
    except PeerError as error:
        told = str(error)
    dist.barrier()
    return told


def test_a_rank_that_left_is_named() -> None:
    assert "rank 1 has closed the group" in run_ranks(2, astray, "left")[0]


def test_ranks_at_different_operations_are_told() -> None:
    for text in run_ranks(2, astray, "phases"):
        assert "fence before an update" in text and "fence after an update" in text
    for text in run_ranks(2, astray, "operations"):
        assert "exchange (2 values)" in text and "at fence" in text
    first, second = run_ranks(2, astray, "reductions")
    assert "rank 0: all_reduce of 4, rank 1: reduce_scatter of 4 elements" in first and "rank 0: all_reduce" in second


def other_purposes(kind: str, calls: list[tuple[str, int]]) -> str:
    scope = Scope(kind)
    purpose, length = calls[scope.group.rank]
    told = ""
    try:
        scope.group.exchange([1.0] * length, purpose, ModelId(1, "a model", "meet next time"))
    except PeerError as error:
        told = str(error)
    dist.barrier()
    return told


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_ranks_that_came_for_different_things_are_told_of_each(kind: str) -> None:
    """Whatever the lengths of their messages."""
    calls = [("the gradient norm", 1), ("which parameters had gradients", 300), ("what to gather", 30)]
    for size in (2, 3):
        expected = "; ".join(
            f"rank {rank}: {what} of a model ({length} values)" for rank, (what, length) in enumerate(calls[:size])
        )
        for text in run_ranks(size, other_purposes, kind, calls[:size]):
            assert f"group 'test': the ranks came to exchange different things: {expected}; meet next time" in text
    norm, gather = calls[0], calls[2]
    for text in run_ranks(3, other_purposes, kind, [norm, gather, norm]):
        assert "ranks [0, 2]: the gradient norm of a model (1 values); rank 1: what to gather of a model (30" in text
    for text in run_ranks(2, other_purposes, kind, [norm, ("the gradient norm", 2)]):
        told = "rank 0: the gradient norm of a model (1 values); rank 1: the gradient norm of a model (2 values);"
        assert told in text
