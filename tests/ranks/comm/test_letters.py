"""Meetings between hosts: what is said arrives whole, whatever its length, and whatever happens to who waits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from scope import PER_HOST, Scope
from sets import campaign, full

from shardwise.comm import PeerError, letters
from shardwise.comm.batch import Errand
from shardwise.comm.gloo import GlooGroup
from shardwise.comm.link import Link, Message
from shardwise.comm.shared import SLOT_VALUES
from shardwise.testing import run_ranks

KINDS = ["gloo", "hosts"]
LENGTHS = [0, 1, 31, SLOT_VALUES - 1, SLOT_VALUES, 3 * SLOT_VALUES, 7 * letters.PLACE_WORDS]


def said(rank: int, length: int, round_: int) -> list[float]:
    return [rank + 0.5 + 10.0 * at + 1e6 * round_ for at in range(length)]


def of_any_length(kind: str) -> None:
    """Ranks say as much as each other, and each another amount."""
    with Scope(kind) as group:
        assert isinstance(group, GlooGroup)
        for round_, length in enumerate([*LENGTHS, *LENGTHS]):
            own = said(group.rank, length, round_)
            assert group.letters.rows(own, "a test") == [said(rank, length, round_) for rank in range(group.size)]
            lengths = [LENGTHS[(rank + round_) % len(LENGTHS)] for rank in range(group.size)]
            rows = group.letters.rows(said(group.rank, lengths[group.rank], round_), "a test")
            assert rows == [said(rank, each, round_) for rank, each in enumerate(lengths)]


@pytest.mark.parametrize(
    ("kind", "size"), [("gloo", 3), ("hosts", 5), *full(("gloo", 4), ("gloo", 5), ("hosts", 3), ("hosts", 4))]
)
def test_what_is_said_has_any_length(kind: str, size: int) -> None:
    run_ranks(size, of_any_length, kind)


def all_told(kind: str, at_once: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with mock.patch.object(letters, "HOSTS_AT_ONCE", at_once), Scope(kind) as group:
        assert isinstance(group, GlooGroup)
        values = [[float(each), -2.0 * each, 7.0] for each in range(size)]
        words = [[1 << each, (1 << 62) + each, each << 33] for each in range(size)]
        for _ in range(3):
            most, bits = group.letters.most(values[rank], words[rank], "a test")
            assert most == [size - 1.0, 0.0, 7.0]
            assert bits == [sum(1 << each for each in range(size)), *(_or(words, at) for at in (1, 2))]
            signed = [[-each, (1 << 40) * each - 5, -(1 << 60) + each] for each in range(size)]
            assert group.letters.total(signed[rank], "a test") == [sum(column) for column in zip(*signed, strict=True)]


def _or(words: list[list[int]], at: int) -> int:
    found = 0
    for row in words:
        found |= row[at]
    return found


@pytest.mark.parametrize(
    ("kind", "size", "at_once"),
    [
        *[("gloo", 3, 1), ("gloo", 4, 16), ("hosts", 7, 1), ("hosts", 4, 16)],
        *full(("gloo", 7, 1), ("gloo", 3, 16), ("hosts", 3, 1), ("hosts", 7, 16)),
        *campaign(("gloo", 4, 1), ("gloo", 7, 16), ("hosts", 4, 1), ("hosts", 3, 16)),
    ],
)
def test_what_all_say_is_summed_up_by_hosts(kind: str, size: int, at_once: int) -> None:
    """All hosts hear each other, or, of many, as many as their number has digits."""
    run_ranks(size, all_told, kind, at_once)


def posted(kind: str) -> tuple[int, int, int]:
    """Places for the first meeting, for each later one, and messages that this rank sends in one."""
    places, sent = [], []
    receive, send = Link.receive_aside, Link.send_aside

    def receiving(link: Link, *rest: Any) -> Message:
        places.append(rest[2] == letters.LETTER)
        return receive(link, *rest)

    def sending(link: Link, *rest: Any) -> Message:
        sent.append(rest[2] == letters.LETTER)
        return send(link, *rest)

    with Scope(kind) as group:
        with mock.patch.object(Link, "receive_aside", receiving), mock.patch.object(Link, "send_aside", sending):
            group.exchange([1.0], "a test")
            first = sum(places)
            places.clear()
            sent.clear()
            for _ in range(5):
                group.exchange([float(group.rank)] * 40, "a longer test")
        return first, sum(places), sum(sent)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_meeting_is_one_message_each_way(kind: str, size: int) -> None:
    """Between hosts, whose ranks have told each other before; places for it were there, and are again."""
    for rank, found in enumerate(run_ranks(size, posted, kind)):
        if kind == "gloo":
            hears = speaks = size - 1
        else:  # a host of one rank speaks to both of the other
            hears, speaks = 1, PER_HOST if size == 3 and rank == 2 else int(rank != 1 or size == 4)
        assert found == (hears * letters.PLACES + hears, 5 * hears, 5 * speaks)


def interrupted(kind: str) -> tuple[str, list[list[float]]]:
    """One rank is interrupted when it waits. It has taken part; the next meeting is the next one for all."""
    with Scope(kind) as group:
        wait, told = Errand.wait, ""

        def cut(errand: Errand) -> None:
            raise KeyboardInterrupt

        with mock.patch.object(Errand, "wait", cut if group.rank == 1 else wait):
            try:
                first = group.exchange([float(group.rank)], "a test")
                assert first == [[float(rank)] for rank in range(group.size)]
            except KeyboardInterrupt:
                told = "interrupted"
        return told, group.exchange([10.0 + group.rank], "another test")


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_ends_the_wait_and_not_the_meeting(kind: str) -> None:
    found = run_ranks(3, interrupted, kind)
    assert found == [(told, [[10.0], [11.0], [12.0]]) for told in ("", "interrupted", "")]


def broken(kind: str) -> list[str]:
    """One rank loses the others; all hear of it, and nobody meets again."""
    told = []
    with Scope(kind, 600.0) as group:
        assert isinstance(group, GlooGroup)
        group.exchange([0.0], "a test")
        take = group.letters._take_part
        if group.rank == 0:
            group.letters._take_part = lambda *_: (_ for _ in ()).throw(PeerError("lost on purpose"))  # type: ignore[method-assign]
        for purpose in ("a second test", "a third test", "a fourth test"):
            try:
                group.exchange([0.0], purpose)
            except PeerError as error:
                told.append(str(error))
        group.letters._take_part = take  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_who_has_lost_the_others_tells_them(kind: str) -> None:
    for rank, told in enumerate(run_ranks(3, broken, kind)):
        assert len(told) >= 2, f"rank {rank}: {told}"
        assert "ranks of it have lost each other before, in exchange of a" in told[-1]
        if rank == 0:
            assert "lost on purpose" in told[0]
    others = [text for told in run_ranks(3, broken, kind)[1:] for text in told]
    assert any("rank 0 has lost the others in meeting 2" in text for text in others)
