"""Exchanges in shared memory that some rank gives up, or leaves: who comes late is told, and the next one is met."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.core.comm import Buffer, PeerError, SharedGroup, shared
from shardwise.testing import run_ranks
from tests.support.scope import Scope
from tests.support.sets import full

SOON_S, NEVER_S = 0.3, 600.0
SLOW_S = 3 * shared.CHECK_S


def exchanged(group: SharedGroup, value: float) -> str:
    """What comes of an exchange of it: the numbers that all ranks have, or why there are none."""
    try:
        return str([row[0] for row in group.exchange([value])])
    except PeerError as error:
        return str(error)


def late() -> list[str]:
    """The last rank comes when the first has given up; one between them would wait for ever."""
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
    """Exchanges and reductions to which each rank in turn comes late, behind one that has failed."""
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
def test_a_rank_that_comes_too_late_fails_as_those_do_that_have_given_it_up(ranks: int) -> None:
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
    """Interrupts take the first rank on to where it says other things in the same place."""
    with Scope("shared") as group:
        assert isinstance(group, SharedGroup)
        if group.rank == 0:
            for value in (1.0, 2.0):
                interrupted(group, value)
            # This rank may not look for the failure of the other one, however late it comes.
            unchecked = mock.patch.object(shared, "CHECK_S", NEVER_S)
            with unchecked, mock.patch.object(group, "wait_until", meeting_at_a_barrier(group.wait_until)):
                return [exchanged(group, 3.0)]
        dist.barrier()
        return [exchanged(group, 10.0 * number) for number in (1, 2, 3)]


def meeting_at_a_barrier(wait_until: Callable[..., None]) -> Callable[..., None]:
    def waiting(missing: Callable[[], list[int]], what: str, meeting: bool = False) -> None:
        dist.barrier()
        wait_until(missing, what, meeting)

    return waiting


def test_what_an_interrupted_rank_says_later_is_not_taken_for_what_it_said() -> None:
    (last,), (first, second, third) = run_ranks(2, left)
    assert "ranks [0] of 2 gave it up before all had come" in first
    assert second == "[2.0, 20.0]" and third == last == "[3.0, 30.0]"
