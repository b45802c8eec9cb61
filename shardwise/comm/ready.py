"""Places for what the next reduction of a buffer gets from other ranks, kept before anybody begins it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.batch import Scratch
from shardwise.comm.group import Buffer
from shardwise.comm.link import BUFFER_RANGE, TAG_RANGE, Link, Message

__all__ = ["KEPT_BYTES", "READY", "Part", "Ready"]

KEPT_BYTES = 16 * 1024**2
"""Of one group: of small buffers all places are kept, of large ones what the bytes take hides what a delay does."""
READY = BUFFER_RANGE * TAG_RANGE
"""Tags of reductions are from here on; see :meth:`Link.tag`."""


@dataclass(frozen=True)
class Part:
    """What one rank sends to this one in a reduction.

    Attributes:
        peer: that rank.
        place: where it goes.
        message: that it comes.
    """

    peer: int
    place: Tensor
    message: Message


# [Note: Places that are kept]
# gloo sends when it has heard that there is a place. Posted where a reduction begins, word of it takes half a trip of
# the wire before the first byte leaves, in each reduction. What a buffer's next reduction will get is known but for its
# size, which is at most that of the largest part: so when one is through, places for the next are posted, in the memory
# of the last, and word of them has long arrived when the peers begin. (A message may be shorter than its place.)
# * A reduction's tag has the buffer's number and how many of it there were; so what a rank sends of a reduction that
#   this one never began is never taken for the next one.
# * That works for the buffers that have a number of their own in a tag, with parts of equal length. Others post where
#   they begin.
class Ready:
    """Of one group.

    Args:
        link: of reductions.
        scratch: memory of parts.
        size: ranks, between which buffers are divided.
    """

    def __init__(self, link: Link, scratch: Scratch, size: int) -> None:
        self._link, self._scratch, self._size = link, scratch, size
        self._counts: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[Buffer, list[Part]] = weakref.WeakKeyDictionary()

    def begin(
        self, buffer: Buffer, numel: int, senders: Sequence[tuple[int, torch.dtype]], what: str
    ) -> tuple[list[Part], int]:
        """Places for the parts of one more reduction, and the tag with which they come.

        Args:
            buffer: what is reduced.
            numel: of this rank's part of it.
            senders: who sends, and numbers of which kind; the same for a buffer each time.
            what: for errors.
        """
        if not self._keeps(buffer):
            tag = self._link.tag(buffer.number)
            return [self._posted(peer, numel, dtype, tag, what) for peer, dtype in senders], tag
        count = self._counts[buffer] = self._counts.get(buffer, 0) + 1
        tag, kept = self._tag(buffer, count), self._kept.pop(buffer, None)
        if kept is None:
            return [self._posted(peer, numel, dtype, tag, what) for peer, dtype in senders], tag
        found = []
        for part in kept:
            part.message.what = f"{what}: receiving from rank {part.peer}"
            found.append(Part(part.peer, part.place[:numel], part.message))
            self._link.received[part.peer] += found[-1].place.nbytes
        return found, tag

    def through(self, buffer: Buffer, parts: Sequence[Part], tag: int) -> None:
        """What the last reduction of ``buffer``, which had this tag, got is read."""
        for part in parts:
            self._scratch.give(part.place)
        room = KEPT_BYTES - sum(each.place.nbytes for kept in self._kept.values() for each in kept)
        numel = buffer.capacity // self._size
        if tag < READY or sum(numel * part.place.itemsize for part in parts) > room:
            return
        tag = self._tag(buffer, self._counts[buffer] + 1)
        what = f"the next reduction of buffer {buffer.number}"
        kept = []
        for part in parts:
            place = self._scratch.take(numel, part.place.dtype)
            kept.append(Part(part.peer, place, self._link.receive_aside(place, part.peer, tag, what)))
        self._kept[buffer] = kept

    def close(self) -> None:
        """No more reductions."""
        self._kept.clear()

    def _keeps(self, buffer: Buffer) -> bool:
        return buffer.bounds is None and 0 < buffer.number < BUFFER_RANGE

    def _tag(self, buffer: Buffer, count: int) -> int:
        return READY + buffer.number * TAG_RANGE + count % TAG_RANGE

    def _posted(self, peer: int, numel: int, dtype: torch.dtype, tag: int, what: str) -> Part:
        place = self._scratch.take(numel, dtype)
        return Part(peer, place, self._link.receive(place, peer, tag, what))
