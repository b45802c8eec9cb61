"""Ranks that die, leave, come late or make another call: errors name them and the operation within seconds.

After an exchange that a rank gave up or left, the next exchange works.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import Buffer, ModelId, PeerError, SharedGroup, shared_memory
from shardwise.testing import run_ranks
from tests.support.launching import forked, start
from tests.support.on_ranks import peer_error
from tests.support.scope import Scope
from tests.support.sets import full

# Ranks that die are separate processes, because a pool ends all its ranks soon after the first failure.


def _rank(fn: Callable[[], str], store: str, rank: int, size: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    connection.send(fn())
    os._exit(0)


def survivors(fn: Callable[[], str], size: int, tmp_path: Path) -> list[str | None]:
    """Return the result of ``fn`` on each rank; ``None`` if the rank died first."""
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
    scope = Scope(kind, 600.0)  # longer than the test waits: the death itself has to raise
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


def test_dead_rank_fails_the_exchange_on_all_ranks(tmp_path: Path) -> None:
    first, dead, last = survivors(partial(_death, "gloo", "meeting"), 3, tmp_path)
    assert dead is None
    for rank, text in ((0, first), (2, last)):
        assert text is not None and f"exchange of a test in group 'test' (rank {rank} of 3) failed" in text


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (
            partial(_death, "shared", "all_reduce"),
            ("all_reduce of buffer 0 (3000 x torch.float32), sequence 1", "rank 1 (process", "has ended"),
        ),
        *full(
            (partial(_death, "shared", "fence"), ("barrier number 3", "rank 1 (process", "has ended")),
            (partial(_death, "gloo", "all_reduce"), ("all_reduce of 3000 x torch.float32", "rank 1")),
        ),
    ],
)
def test_error_names_the_dead_rank(fn: Callable[[], str], words: tuple[str, ...], tmp_path: Path) -> None:
    """The error comes long before the time-out of the group."""
    told = survivors(fn, 3, tmp_path)
    assert told[1] is None
    assert all(told[rank] is not None for rank in (0, 2))
    # One survivor may get the error from the other survivor, which failed first.
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
    scope = Scope("shared")
    (full,) = scope.group.buffers([(4, torch.float32)])
    return peer_error(lambda: MEETINGS[name](scope.group, full))


def test_error_names_a_closed_group_or_another_operation() -> None:
    assert "rank 1 has closed the group" in run_ranks(2, astray, "left")[0]
    for text in run_ranks(2, astray, "phases"):
        assert "fence before an update" in text and "fence after an update" in text
    for text in run_ranks(2, astray, "operations"):
        assert "exchange (2 values)" in text and "at fence" in text
    first, second = run_ranks(2, astray, "reductions")
    assert "rank 0: all_reduce of 4, rank 1: reduce_scatter of 4 elements" in first and "rank 0: all_reduce" in second


def other_purposes(kind: str, calls: list[tuple[str, int]]) -> str:
    scope = Scope(kind)
    purpose, length = calls[scope.group.rank]
    model = ModelId(1, "a model", "meet next time")
    return peer_error(lambda: scope.group.exchange([1.0] * length, purpose, model))


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_error_names_the_purposes_of_all_ranks(kind: str) -> None:
    """The lengths of the messages do not matter."""
    calls = [("the gradient norm", 1), ("which parameters had gradients", 300), ("what to gather", 30)]
    for size in (2, 3):
        expected = "; ".join(
            f"rank {rank}: {what} of a model ({length} values)" for rank, (what, length) in enumerate(calls[:size])
        )
        for text in run_ranks(size, other_purposes, kind, calls[:size]):
            assert f"the ranks of 'test' are at different calls: {expected}; meet next time" in text
    norm, gather = calls[0], calls[2]
    for text in run_ranks(3, other_purposes, kind, [norm, gather, norm]):
        assert "ranks [0, 2]: the gradient norm of a model (1 values); rank 1: what to gather of a model (30" in text
    for text in run_ranks(2, other_purposes, kind, [norm, ("the gradient norm", 2)]):
        told = "rank 0: the gradient norm of a model (1 values); rank 1: the gradient norm of a model (2 values);"
        assert told in text


SOON_S, NEVER_S = 0.3, 600.0
SLOW_S = 3 * shared_memory.CHECK_S


def exchanged(group: SharedGroup, value: float) -> str:
    """Return the values of all ranks after an exchange, or its error."""
    try:
        return str([row[0] for row in group.exchange([value])])
    except PeerError as error:
        return str(error)


def late() -> list[str]:
    """The last rank comes after the first one gave up; a rank between them has no time-out of its own."""
    with Scope("shared") as group:
        assert isinstance(group, SharedGroup)
        group.timeout_s = SOON_S if group.rank == 0 else NEVER_S
        last, word = group.size - 1, torch.zeros(1)
        (full,) = group.buffers([(group.size, torch.float32)])
        if group.rank == last:
            dist.recv(word, src=0)
        told = [exchanged(group, group.rank)]
        group.timeout_s = NEVER_S
        if group.rank == 0:
            dist.send(word, dst=last)
        return told + slowly(group, full)


def slowly(group: SharedGroup, full: Buffer) -> list[str]:
    """Make exchanges and reductions to which each rank in turn comes late, after an exchange that failed."""
    told = []
    for number in range(group.size):
        if number % group.size == group.rank:
            time.sleep(SLOW_S)
        told.append(exchanged(group, 10.0 * number + group.rank))
        full.wait_writable()
        full.local.fill_(1.0)
        if number % group.size == group.rank:
            time.sleep(SLOW_S)
        group.all_reduce(full, 1.0).wait()
        assert full.local.tolist() == [group.size] * group.size
    return told


@pytest.mark.parametrize("ranks", [2, *full(3)])
def test_late_rank_fails_like_the_ranks_that_gave_up(ranks: int) -> None:
    (first, *met), *others = run_ranks(ranks, late, timeout=120.0)
    assert "rank 0 waited" in first and "is running but has not come" in first
    expected = [str([10.0 * number + rank for rank in range(ranks)]) for number in range(ranks)]
    assert met == expected
    for told, *met in others:
        assert "gave it up before all had come" in told and met == expected
    assert any("ranks [0] of" in told for told, *_ in others)


def interrupted(group: SharedGroup, value: float) -> None:
    def signalled(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with mock.patch.object(group, "wait_until", signalled), pytest.raises(KeyboardInterrupt):
        group.exchange([value])


def left() -> list[str]:
    """Interrupt rank 0 in two exchanges; its third one must not be taken for an earlier one."""
    with Scope("shared") as group:
        assert isinstance(group, SharedGroup)
        if group.rank == 0:
            for value in (1.0, 2.0):
                interrupted(group, value)
            # This rank must not check for a failure of the other one while it waits.
            unchecked = mock.patch.object(shared_memory, "CHECK_S", NEVER_S)
            with unchecked, mock.patch.object(group, "wait_until", meeting_at_a_barrier(group.wait_until)):
                return [exchanged(group, 3.0)]
        dist.barrier()
        return [exchanged(group, 10.0 * number) for number in (1, 2, 3)]


def meeting_at_a_barrier(wait_until: Callable[..., None]) -> Callable[..., None]:
    def waiting(missing: Callable[[], list[int]], what: str, meeting: bool = False) -> None:
        dist.barrier()
        wait_until(missing, what, meeting)

    return waiting


def test_values_after_an_interrupt_are_not_mixed_with_earlier_ones() -> None:
    (last,), (first, second, third) = run_ranks(2, left)
    assert "ranks [0] of 2 gave it up before all had come" in first
    assert second == "[2.0, 20.0]" and third == last == "[3.0, 30.0]"
