"""What ranks tell each other on the host: numbers by rank, what all of them come to, and that all came for the same."""

from __future__ import annotations

import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardwise.comm.activity import Activity
from shardwise.comm.control import decode, encode
from shardwise.comm.errors import PeerError
from shardwise.comm.exact import end_word, first_word, rounded, together, words_of
from shardwise.comm.traffic import Traffic

__all__ = ["NOBODY", "Meeting", "Party", "Summary", "ranks_text"]

EXCHANGE_QUANTUM = 32  # values; what has a purpose is padded to it, so that ranks which differ still meet
LENGTHS = 2**32  # a party's number travels above its number of values
MOST_NAMED = 16
BITS = 48  # flags per number; integers below 2**53 are exact
FLAG_WORDS = 64  # in the first message of what is summed up: of 1536 flags, which a rank has, and which it lacks

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
# Up to ``rows_up_to`` ranks, and where memory is mapped, every rank gets every rank's numbers: one small all-gather,
# which is the fastest. Of thousands that would be megabytes a time, and a look at each of them in Python. There ranks
# first learn the least and the most of each number: in round k a rank hears from the one 2^k before it, so that is as
# many messages as the number of ranks has digits, each of a kilobyte. What all have alike needs nothing more, and an
# agreement is nearly always about what should be alike; flags and counts need nothing more either (summarize), up to
# thirty numbers and 1536 flags: what there is above that follows in as many messages again. A sum is exact in whole
# numbers (totals), in at most twice as many messages, which hold nothing but the words of 32 bits that any rank has
# something in: of a norm's shares some four, where numbers of all sizes would have 66. Only where ranks ask for each
# other's numbers and these differ does each get all
# of them. The first message has one size whatever it is about: ranks that came for different things meet in it, see
# that they differ, and tell each other in words.
class Meeting(ABC):
    """The part of a group that is about the host's agreement; see :class:`~shardwise.comm.group.Group`.

    Attributes:
        disseminates: numbers can be summed up by messages from rank to rank (:meth:`_most`, :meth:`_total`).
        rows_up_to: ranks among which each gets all numbers at once; see [Note: How many ranks an agreement takes].
    """

    disseminates = False
    rows_up_to = 16
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
        """All ranks' values made one: their sum, exact and then rounded once, so that it is the same whatever the order
        of the ranks; or the largest of them. And of each number ``beside`` it, whether all ranks have the same.

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
        own = [*map(float, values), *map(float, beside)]
        lowest = [] if largest else [float(first_word(value)) for value in own[:count]]
        found = self._summed_up(own + lowest, purpose, whose, ())
        bounds = list(zip(found.least, found.most, strict=True))
        sums, spans = list[float](), dict[int, tuple[int, int]]()
        for at, (least, most) in enumerate(bounds[:count]):
            # One that is not finite makes the sum so, and an equal share of all is multiplied exactly.
            sums.append(most if largest or not math.isfinite(most) else most * self.size)
            if not largest and math.isfinite(most) and least != most:
                spans[at] = int(bounds[len(own) + at][0]), end_word(max(-least, most))
        if spans:
            words = [word for at, span in spans.items() for word in words_of(own[at], *span)]
            messages = self.size.bit_length() + self.size.bit_count() - 2
            self.traffic.add("exchange", messages * 8 * len(words))
            added = iter(self._total(words, purpose))
            for at, (first, end) in spans.items():
                sums[at] = rounded(list(islice(added, end - first)), first)
        return sums, [least == most for least, most in bounds[count : len(own)]]

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
        if self._summed_up(own, purpose, whose, ()).alike:
            return own
        self.traffic.add("exchange", (self.size - 1).bit_length() * 8 * len(own))
        return self._most(own if self.rank == 0 else [-math.inf] * len(own), [], purpose)[0]

    @property
    def _by_rows(self) -> bool:
        return not self.disseminates or self.size <= self.rows_up_to

    def _meet(self, values: Sequence[float], purpose: str, whose: Party = NOBODY) -> list[list[float]]:
        if not self._by_rows:
            own = [float(value) for value in values]
            if self._summed_up(own, purpose, whose, ()).alike:
                return [own] * self.size
            self.traffic.add("exchange", (self.size - 1) * 8 * len(own))
            return self._exchange(own, purpose)
        # One message of fixed size comes first, whatever is sent, so that ranks which came for different things can
        # tell.
        sent = _headed(values, purpose, whose, len(values))
        # What is longer follows once the ranks know that they came for the same.
        rows = self._exchange(sent[:EXCHANGE_QUANTUM], purpose)
        if any(row[:2] != sent[:2] for row in rows):
            raise PeerError(self._astray(purpose, len(values), whose))
        if len(sent) > EXCHANGE_QUANTUM:
            for row, rest in zip(rows, self._exchange(sent[EXCHANGE_QUANTUM:], purpose), strict=True):
                row.extend(rest)
        return [row[2 : 2 + len(values)] for row in rows]

    def _summed_up(self, values: list[float], purpose: str, whose: Party, flags: Sequence[bool]) -> Summary:
        # Of each word the flags that this rank has, and those that it lacks.
        words = [each for word in map(int, pack_bits(flags)) for each in (word, ~word & (1 << BITS) - 1)]
        count = len(values) + len(words) // 2
        sent = _headed(values, purpose, whose, count)
        first = words[:FLAG_WORDS] + [0] * (FLAG_WORDS - len(words))
        most, least, some = self._extremes(sent[:EXCHANGE_QUANTUM], first, purpose)
        if most[:2] != least[:2]:
            raise PeerError(self._astray(purpose, count, whose))
        if len(sent) > EXCHANGE_QUANTUM or len(words) > FLAG_WORDS:
            further = self._extremes(sent[EXCHANGE_QUANTUM:], words[FLAG_WORDS:], purpose)
            most, least, some = most + further[0], least + further[1], some + further[2]
        most, least = (each[2 : 2 + len(values)] for each in (most, least))
        held, lacking = some[: len(words) : 2], some[1 : len(words) : 2]
        # What one rank has and another lacks.
        same = not any(has & lack for has, lack in zip(held, lacking, strict=True))
        alike = same and all(one == other for one, other in zip(least, most, strict=True))
        return Summary(least, most, unpack_bits(held, len(flags)), alike, same)

    def _extremes(
        self, values: list[float], words: list[int], purpose: str
    ) -> tuple[list[float], list[float], list[int]]:
        """The most and the least of all ranks' ``values``, and the bits of all their ``words``."""
        sent = [*values, *(-value for value in values)]
        self.traffic.add("exchange", (self.size - 1).bit_length() * 8 * (len(sent) + len(words)))
        found, some = self._most(sent, words, purpose)
        return found[: len(values)], [-value for value in found[len(values) :]], some

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

    def _most(self, values: Sequence[float], words: Sequence[int], purpose: str) -> tuple[list[float], list[int]]:
        """Of each of the values the most that any rank has, and of each word the bits that any rank has."""
        raise NotImplementedError(f"numbers summed up in {self!r} (disseminates={self.disseminates})")

    def _total(self, words: Sequence[int], purpose: str) -> list[int]:
        """Of each word the sum over all ranks."""
        raise NotImplementedError(f"sums of words in {self!r} (disseminates={self.disseminates})")


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a message: of thousands the first few, and how many there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"ranks {list(ranks[:MOST_NAMED])}{more}"


def _padded(count: int) -> int:
    return count + 2 + (-count - 2) % EXCHANGE_QUANTUM


def _headed(values: Sequence[float], purpose: str, whose: Party, count: int) -> list[float]:
    """With what the ranks came for, padded."""
    sent = [float(_checksum(purpose)), float(whose.number * LENGTHS + count), *values]
    return sent + [0.0] * (-len(sent) % EXCHANGE_QUANTUM)


def pack_bits(flags: Sequence[bool]) -> list[float]:
    """Flags as exactly representable numbers, :data:`BITS` each."""
    words = []
    for start in range(0, len(flags), BITS):
        words.append(float(sum(1 << i for i, flag in enumerate(flags[start : start + BITS]) if flag)))
    return words


def unpack_bits(words: Sequence[float], count: int) -> list[bool]:
    """The ``count`` flags that :func:`pack_bits` made ``words`` of."""
    return [bool(int(words[i // BITS]) >> (i % BITS) & 1) for i in range(count)]
