"""What ranks tell each other on the host: numbers by rank, what all of them come to, and that all came for the same."""

from __future__ import annotations

import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.comm.activity import Activity
from shardwise.core.comm.control import Operation, decode, encode
from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.traffic import Traffic

__all__ = ["NOBODY", "Meeting", "Party", "Summary", "ranks_text", "together"]

EXCHANGE_QUANTUM = 32  # values; what has a purpose is padded to it, so that ranks which differ still meet
LENGTHS = 2**32  # a party's number travels above its number of values
MOST_NAMED = 16
BITS = 48  # flags per number; integers below 2**53 are exact
FIRST_NUMBERS = 256  # of a rank, in the first message of those that are summed up

_checksum = functools.lru_cache(maxsize=1024)(lambda purpose: zlib.crc32(purpose.encode()))


@dataclass(frozen=True)
class Party:
    """A model among those that share groups. Its number travels with what it exchanges, so that one model's values are
    never taken for another's.

    Attributes:
        number: among those of a mesh, from 1, in the order in which they were built; the same on every rank.
        name: for messages.
        advice: what a message says to ranks that came for its sake and did not meet.
    """

    number: int
    name: str
    advice: str = ""


NOBODY = Party(0, "")


@dataclass(frozen=True)
class Summary:
    """What all ranks' numbers and flags come to, without saying whose each is.

    Attributes:
        least, most: of each of the values.
        anywhere: of each of the flags, whether any rank has it.
        alike: every rank has the same values and flags.
        flags_alike: every rank has the same flags.
    """

    least: list[float]
    most: list[float]
    anywhere: list[bool]
    alike: bool
    flags_alike: bool


# [Note: How many ranks an agreement takes]
# Up to ``rows_up_to`` ranks every rank gets every rank's numbers: one small all-gather, and sums that do not depend on
# the order of the ranks. Of thousands that would be megabytes a time, and a look at each of them in Python. There ranks
# learn the least and the most of each number, and of each flag, by one all-reduce: what all have alike needs nothing
# more, and an agreement is nearly always about what should be alike. A sum is one all-reduce more, the same on every
# rank. Only where ranks ask for each other's numbers and these differ does each get all of them. The first message has
# one size whatever it is about: ranks that came for different things meet in it, see that they differ, and tell each
# other in words.
class Meeting(ABC):
    """The part of a group that is about the host's agreement; see :class:`~shardwise.core.comm.group.Group`.

    Attributes:
        rows_up_to: ranks among which each gets all numbers at once; see [Note: How many ranks an agreement takes].
    """

    rows_up_to = 64
    name: str
    rank: int
    size: int
    activity: Activity
    traffic: Traffic

    def exchange(self, values: Sequence[float], purpose: str = "", whose: Party = NOBODY) -> list[list[float]]:
        """Every rank's ``values``, by rank, as float64 (integers below 2**53 are exact). Same length everywhere. Where
        one number or a flag of all ranks is enough, :meth:`summarize` is for more ranks.

        Args:
            values: of this rank.
            purpose: what they are, in a few words; ranks that come here for different purposes are told so, where
                otherwise one's values would be taken for the other's. Its checksum travels along, and small messages
                are padded so that ranks which differ still meet.
            whose: the model that they are of; the same on all ranks as the purpose is.

        Returns:
            By rank. Not to be written to: rows that are equal may be one object.

        Raises:
            PeerError: the ranks' purposes, lengths or models differ; says what each rank came for.
        """
        if not purpose:
            self.traffic.add("exchange", (self.size - 1) * 8 * len(values))
            return self._exchange(values, purpose)
        if self._by_rows:
            self.traffic.add("exchange", (self.size - 1) * 8 * _padded(len(values)))
        return self._meet(values, purpose, whose)

    def summarize(
        self, values: Sequence[float], purpose: str, whose: Party = NOBODY, flags: Sequence[bool] = ()
    ) -> Summary:
        """What all ranks' values and flags come to: for agreements that need no rank's own, among any number of ranks.

        Args:
            values: of this rank, none of them NaN.
            purpose, whose: as in :meth:`exchange`, which ranks may come to instead: then all are told.
            flags: of this rank.

        Raises:
            PeerError: as :meth:`exchange`.
        """
        count = len(values)
        if not self._by_rows:
            return self._summed_up([float(value) for value in values], purpose, whose, flags)
        packed = pack_bits(flags)
        self.traffic.add("exchange", (self.size - 1) * 8 * _padded(count + len(packed)))
        rows = self._meet([*values, *packed], purpose, whose)
        columns = list(zip(*(row[:count] for row in rows), strict=True))
        words = [row[count:] for row in rows]
        alike = all(each == words[0] for each in words)
        held = [functools.reduce(int.__or__, map(int, column)) for column in zip(*words, strict=True)]
        return Summary(
            [min(column) for column in columns],
            [max(column) for column in columns],
            unpack_bits(held, len(flags)),
            alike and all(row[:count] == rows[0][:count] for row in rows),
            alike,
        )

    def total(
        self,
        value: float,
        purpose: str,
        whose: Party = NOBODY,
        beside: Sequence[float] = (),
        largest: bool = False,
    ) -> tuple[float, list[bool]]:
        """All ranks' values made one: their sum, which up to :attr:`rows_up_to` ranks is exact and rounded once, the
        same whatever their order; or the largest of them. And of each number ``beside`` it, whether all ranks have the
        same.

        Args:
            value: of this rank, not minus infinity. One that is NaN makes all NaN, otherwise one that is infinite
                makes all infinite.
            purpose, whose: as in :meth:`exchange`.
            beside: other numbers of this rank.
            largest: whether the largest is wanted.

        Raises:
            PeerError: as :meth:`exchange`.
        """
        (found,), same = self.totals([value], purpose, whose, beside, largest)
        return found, same

    def totals(
        self,
        values: Sequence[float],
        purpose: str,
        whose: Party = NOBODY,
        beside: Sequence[float] = (),
        largest: bool = False,
    ) -> tuple[list[float], list[bool]]:
        """As :meth:`total`, of each of several values, in as many messages as for one."""
        count = len(values)
        if self._by_rows:
            columns = list(zip(*self.exchange([*values, *beside], purpose, whose), strict=True))
            same = [all(each == column[0] for each in column) for column in columns[count:]]
            return [together(column, largest) for column in columns[:count]], same
        found = self._summed_up([*map(float, values), *map(float, beside)], purpose, whose)
        same = [least == most for least, most in zip(found.least[count:], found.most[count:], strict=True)]
        if not largest:
            return self._reduced(list(map(float, values)), "sum", purpose), same
        # What is NaN is the least, too, and nothing else is so small.
        bounds = zip(found.least[:count], found.most[:count], strict=True)
        return [math.nan if least == -math.inf else most for least, most in bounds], same

    def broadcast_values(self, values: Sequence[float], purpose: str, whose: Party = NOBODY) -> list[float]:
        """Rank 0's values. Each rank gives its own, as many as that; where all have the same nothing more is said.

        Args:
            values: of this rank.
            purpose, whose: as in :meth:`exchange`.

        Raises:
            PeerError: as :meth:`exchange`.
        """
        if self._by_rows:
            return self.exchange(values, purpose, whose)[0]
        own = [float(value) for value in values]
        if self._summed_up(own, purpose, whose).alike:
            return own
        return self._reduced(own if self.rank == 0 else [-math.inf] * len(own), "max", purpose)

    @property
    def _by_rows(self) -> bool:
        return self.size <= self.rows_up_to

    def _meet(self, values: Sequence[float], purpose: str, whose: Party = NOBODY) -> list[list[float]]:
        if not self._by_rows:
            own = [float(value) for value in values]
            if self._summed_up(own, purpose, whose).alike:
                return [own] * self.size
            self.traffic.add("exchange", (self.size - 1) * 8 * len(own))
            return self._exchange(own, purpose)
        # One message of fixed size comes first, whatever is sent, so that ranks which came for different things can
        # tell.
        sent = _headed(values, purpose, whose, len(values), EXCHANGE_QUANTUM)
        # What is longer follows once the ranks know that they came for the same.
        rows = self._exchange(sent[:EXCHANGE_QUANTUM], purpose)
        if any(row[:2] != sent[:2] for row in rows):
            raise PeerError(self._astray(purpose, len(values), whose))
        if len(sent) > EXCHANGE_QUANTUM:
            for row, rest in zip(rows, self._exchange(sent[EXCHANGE_QUANTUM:], purpose), strict=True):
                row.extend(rest)
        return [row[2 : 2 + len(values)] for row in rows]

    def _summed_up(self, values: list[float], purpose: str, whose: Party, flags: Sequence[bool] = ()) -> Summary:
        count = len(values) + len(flags)
        sent = _headed([*values, *map(float, flags)], purpose, whose, count, FIRST_NUMBERS)
        least, most = self._extremes(sent[:FIRST_NUMBERS], purpose)
        if most[:2] != least[:2]:
            raise PeerError(self._astray(purpose, count, whose))
        if len(sent) > FIRST_NUMBERS:
            further = self._extremes(sent[FIRST_NUMBERS:], purpose)
            least, most = least + further[0], most + further[1]
        least, most = (each[2 : 2 + count] for each in (least, most))
        split = len(values)
        return Summary(
            least[:split], most[:split], list(map(bool, most[split:])), least == most, least[split:] == most[split:]
        )

    def _extremes(self, values: list[float], purpose: str) -> tuple[list[float], list[float]]:
        """The least and the most of all ranks' ``values``; where one is NaN, the infinities."""
        sent = [math.inf if math.isnan(each) else each for each in (*values, *(-value for value in values))]
        found = self._reduced(sent, "max", purpose)
        return [-value for value in found[len(values) :]], found[: len(values)]

    def _reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        """All ranks' ``values`` made one, number by number, none of them NaN where the most is wanted. The same bits on
        every rank."""
        self.traffic.add("exchange", 2 * (self.size - 1) * 8 * len(values) // self.size)
        return self._all_reduced(values, operation, purpose)

    def _astray(self, purpose: str, count: int, whose: Party) -> str:
        """All ranks have seen that they differ; now they tell each other in words."""
        came_for = f"{purpose}{f' of {whose.name}' if whose.name else ''} ({count} values)"
        now, of_call = self.activity.now, self.activity.advice
        own = encode([f"{came_for} while {now}" if now else came_for, of_call, whose.advice])
        lengths = [int(row[0]) for row in self._exchange([float(len(own))], "lengths")]
        told = [decode(each) for each in self._exchange_bytes(own, lengths)]
        by_purpose: dict[str, list[int]] = {}
        for rank, (what, *_) in enumerate(told):
            by_purpose.setdefault(what, []).append(rank)
        lines = [f"{ranks_text(who)}: {what}" for what, who in by_purpose.items()]
        # A call that some of them are in says more than what the others are at.
        lines += [text for column in list(zip(*told, strict=True))[1:] for text in column if text][:1]
        return f"group {self.name!r}: the ranks came to exchange different things: {'; '.join(lines)}"

    def exchange_object(self, obj: object, purpose: str = "what all of them have to tell") -> list[Any]:
        """Every rank's ``obj``, by rank, after a round trip through JSON (tuples come back as lists). For rare use.

        Args:
            obj: of this rank.
            purpose: as in :meth:`exchange`.

        Raises:
            TypeError: ``obj`` cannot be written as JSON.
            PeerError: as :meth:`exchange`.
        """
        data = encode(obj)
        told = 8 * EXCHANGE_QUANTUM if self._by_rows else 0
        self.traffic.add("exchange", (self.size - 1) * (told + len(data)))
        return self._meet_bytes(data, purpose)

    def _meet_bytes(self, data: bytes, purpose: str) -> list[Any]:
        lengths = [int(row[0]) for row in self._meet([float(len(data))], purpose)]
        return [decode(each) for each in self._exchange_bytes(data, lengths)]

    # What a backend provides.

    @abstractmethod
    def _exchange(self, values: Sequence[float], purpose: str) -> list[list[float]]: ...

    @abstractmethod
    def _exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]: ...

    def _all_reduced(self, values: list[float], operation: Operation, purpose: str) -> list[float]:
        return [together(column, operation == "max") for column in zip(*self._exchange(values, purpose), strict=True)]


def together(values: Sequence[float], largest: bool) -> float:
    """Numbers made one: their sum, rounded once, so that their order makes no difference; or the largest.
    NaN where one is."""
    if any(math.isnan(value) for value in values):
        return math.nan
    if largest or math.inf in values:
        return max(values)
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a message: of thousands the first few, and how many there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"ranks {list(ranks[:MOST_NAMED])}{more}"


def _padded(count: int) -> int:
    return count + 2 + (-count - 2) % EXCHANGE_QUANTUM


def _headed(values: Sequence[float], purpose: str, whose: Party, count: int, quantum: int) -> list[float]:
    """With what the ranks came for, padded."""
    sent = [float(_checksum(purpose)), float(whose.number * LENGTHS + count), *values]
    return sent + [0.0] * (-len(sent) % quantum)


def pack_bits(flags: Sequence[bool]) -> list[float]:
    """Flags as exactly representable numbers, :data:`BITS` each."""
    words = []
    for start in range(0, len(flags), BITS):
        words.append(float(sum(1 << i for i, flag in enumerate(flags[start : start + BITS]) if flag)))
    return words


def unpack_bits(words: Sequence[float], count: int) -> list[bool]:
    """The ``count`` flags that :func:`pack_bits` made ``words`` of."""
    return [bool(int(words[i // BITS]) >> (i % BITS) & 1) for i in range(count)]
