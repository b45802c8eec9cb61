"""Gathers of shards of other hosts that come down once for all ranks of a host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.comm.batch import Batch, Errand, Watcher
from shardwise.comm.errors import PeerError
from shardwise.comm.landing import HERE, LOST, UNDER_WAY, Entry, Landing
from shardwise.comm.link import Message

if TYPE_CHECKING:
    from shardwise.comm.hosts import HostsGroup

__all__ = ["Ask", "Landed"]

NAP_FIRST_S, NAP_MAX_S, CHECK_S = 20e-6, 200e-6, 0.2

Ask = Callable[[Callable[[int], Tensor]], list[Message]]
"""Asks the ranks of other hosts for their parts, each into what the function gives for it."""


class Landed:
    """One gather: what other hosts have of it lands on this one, or has, and is copied from there; see [Note: A host's
    landing].

    Args:
        group: the ranks.
        slices: of this rank's array, by rank of another host.
        landing: of this host.
        key: what it is a gather of, the same on all ranks of the host.
        ask: for what is not there.
    """

    def __init__(self, group: HostsGroup, slices: dict[int, Tensor], landing: Landing, key: int, ask: Ask) -> None:
        self._group, self._slices, self._landing, self._ask = group, slices, landing, ask
        self._brings: Errand | None = None
        self._alone: Batch | None = None
        self.through = False
        self._entry, mine = landing.enter(key, sum(each.nbytes for each in slices.values()))
        if self._entry is None:
            self._ask_alone()
        elif mine:
            self._bring(self._entry, group.bringer)

    def wait(self) -> None:
        if self._brings is not None and self._entry is not None:
            try:
                self._brings.wait()
            except PeerError:
                self.through = True
                raise
        elif self._entry is not None and not self._comes(self._entry):
            self._ask_alone()
        self._copy()
        if self._alone is not None:
            self._alone.wait()
        self.through = True

    def finished(self) -> bool:
        """See :meth:`Handle.finished`."""
        if self.through:
            return True
        if self._entry is not None:
            state = self._landing.state(self._entry)
            if state == UNDER_WAY or (self._brings is not None and not self._brings.finished()):
                return False
            if state == LOST:
                if self._brings is not None:
                    return True  # wait() tells why
                self._ask_alone()
            self._copy()
        self.through = self._alone is None or self._alone.finished()
        return self.through

    def _bring(self, entry: Entry, bringer: Watcher) -> None:
        landing, places, messages = self._landing, self._places(entry), list[Message]()
        try:
            messages += self._ask(places.__getitem__)
            self._brings = Errand(lambda: _bring(messages, landing, entry), bringer)
        except BaseException:
            if self._brings is None:  # what was asked for comes, and must not come into memory with another use
                for message in messages:
                    with suppress(PeerError):
                        message.wait()
                landing.mark(entry, LOST)
                landing.unpin(entry)
            raise

    def _places(self, entry: Entry) -> dict[int, Tensor]:
        """Where each rank's part is of what lands."""
        places, begin = dict[int, Tensor](), 0
        for member, part in self._slices.items():
            places[member] = entry.at[begin : begin + part.nbytes].view(part.dtype)
            begin += part.nbytes
        return places

    def _comes(self, entry: Entry) -> bool:
        """Wait for what another rank brings; whether it has come, or its rank is gone or has lost it."""
        nap, began = NAP_FIRST_S, time.monotonic()
        checked, inside = began, self._group.inside
        while (state := self._landing.state(entry)) == UNDER_WAY:
            time.sleep(nap)
            nap, now = min(2 * nap, NAP_MAX_S), time.monotonic()
            if now - checked > CHECK_S:
                checked = now
                if inside.fate(entry.fetcher) or now - began > inside.timeout_s:
                    return self._landing.state(entry) == HERE
        return state == HERE

    def _ask_alone(self) -> None:
        if self._entry is not None:
            self._landing.unpin(self._entry)
            self._entry = None
        self._alone = Batch(self._ask(self._slices.__getitem__), self._group.watchers[0])

    def _copy(self) -> None:
        if self._entry is None:
            return
        for member, part in self._places(self._entry).items():
            self._slices[member].copy_(part)
        self._landing.unpin(self._entry)
        self._entry = None


def _bring(messages: list[Message], landing: Landing, entry: Entry) -> None:
    try:
        for message in messages:
            message.wait()
    except BaseException:
        landing.mark(entry, LOST)
        raise
    landing.mark(entry, HERE)
