"""Where ranks that share memory say what they come to a meeting with, and what comes of it where not all do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwise.comm.errors import PeerError
from shardwise.comm.group import PHASES
from shardwise.comm.mapping import LINE_WORDS

if TYPE_CHECKING:
    from shardwise.comm.shared import SharedGroup

__all__ = [
    "ARRIVED",
    "BARRIER",
    "CONTROL_BYTES",
    "EXCHANGE",
    "FENCE",
    "KINDS",
    "SLOTS",
    "SLOT_VALUES",
    "SLOT_WORDS",
    "STATE",
    "settle",
    "wait_for_all",
]

# The control segment: line 1 holds the count of synchronisations and the state; two slots follow, used in turn. A rank
# that writes slot s again has seen all peers arrive at s + 1, so nobody reads it then; or it has left some of them,
# which see that by the head. A slot's first word is its head: the number of the synchronisation, and its kind, or what
# has become of it here. Before the first it is 0.
ARRIVED = LINE_WORDS
STATE = LINE_WORDS + 1
SLOT_VALUES = 256
SLOT_WORDS = LINE_WORDS + SLOT_VALUES
SLOTS = 2 * LINE_WORDS
CONTROL_BYTES = 8 * (SLOTS + 2 * SLOT_WORDS)
SYNCS = ("exchange", "fence", "barrier")
EXCHANGE, FENCE, BARRIER, DOUBTED, GIVEN_UP = range(5)
KINDS = 5
"""A head is so many times the number, and the kind."""
SEEN_S = 10e-3
"""Far longer than a processor keeps from the others what it has stored."""


# [Note: Exchanges that are given up]
# A rank that waits for the others in vain raises, and drops what the exchange was about. One that is late finds what
# the first had to say, and would go on with it, alone. So they have to come to one verdict, without a lock, and where
# all come in time nobody may wait for more than that.
# * Who gives up says that it doubts, waits until all see that, and looks again. If a rank is missing still, it finds
#   the doubt, or what has come of it, when it arrives: the exchange is given up. If all have arrived, some of them may
#   have looked before there was a doubt, and have gone on: the doubt is taken back, and the exchange is met.
# * Who has seen all arrive looks at the heads behind that, and waits for the end of a doubt, which is milliseconds
#   away. A doubt whose rank is at a later meeting (an interrupt took it there), has died or was stopped counts as given
#   up, which that rank sees if it ever looks.
# * An interrupt may take a rank on to where it uses a slot again. The head is taken away before anything else of the
#   slot is written and comes back with the next number, and peers read it behind the values: they see that it was left.
# Reductions need none of this: a meeting ends their pass, and there it shows who has dropped it.
def wait_for_all(
    group: SharedGroup, words: list[memoryview], missing: Callable[[], list[int]], slot: int, head: int, purpose: str
) -> None:
    """This rank has arrived; return when ``missing()`` names no other.

    Raises:
        PeerError: it does still, and the exchange is given up.
    """
    mine, kind = words[group.rank], head % KINDS
    try:
        group.wait_until(missing, _full_name(head, purpose), meeting=True)
    except PeerError:
        mine[slot] = head - kind + DOUBTED
        time.sleep(SEEN_S)
        if missing():
            mine[slot] = head - kind + GIVEN_UP
            raise
        mine[slot] = head


def settle(group: SharedGroup, words: list[memoryview], slot: int, head: int, total: int, purpose: str) -> None:
    """All have arrived, and some head was another: return if that was a doubt, and is over.

    Raises:
        PeerError: some rank has given the exchange up, left it, or come for something else.
    """
    number, kind = divmod(head, KINDS)
    what = _full_name(head, purpose)

    def doubting() -> list[int]:
        return [rank for rank, w in enumerate(words) if w[slot] == head - kind + DOUBTED and w[ARRIVED] == number]

    until = time.monotonic() + max(group.timeout_s, 100 * SEEN_S)
    while ranks := doubting():
        if time.monotonic() > until or any(group.fate(rank, failed=False) for rank in ranks):
            words[group.rank][slot] = head - kind + GIVEN_UP
            break
        time.sleep(SEEN_S / 10)
    found = [(*divmod(each[slot], KINDS), each[slot + 1]) for each in words]
    others = [rank for rank, each in enumerate(found) if each != (number, kind, total)]
    if not others:
        return
    group.fail()
    gone = [rank for rank in others if found[rank][0] != number or found[rank][1] in (DOUBTED, GIVEN_UP)]
    if gone:
        raise PeerError(
            f"{what} in group {group.name!r}: ranks {gone} of {group.size} gave it up before all had come, so rank "
            f"{group.rank} gives it up, too. Look at the first error of those ranks; the time-out is "
            f"{group.timeout_s:g} s" + group.around(gone)
        )
    _, kind_there, total_there = found[others[0]]
    raise PeerError(
        f"group {group.name!r}: rank {group.rank} is at {_name(kind, total)} and rank {others[0]} at "
        f"{_name(kind_there, total_there)}; all must come to the same operations in order" + group.around(others[:1])
    )


def _full_name(head: int, purpose: str) -> str:
    number, kind = divmod(head, KINDS)
    return f"{SYNCS[kind]} number {number}" + (f" ({purpose})" if purpose else "")


def _name(kind: int, total: int) -> str:
    if kind == FENCE:
        return f"{SYNCS[kind]} {PHASES[total]}".rstrip()
    return f"{SYNCS[kind]} ({total} values)"
