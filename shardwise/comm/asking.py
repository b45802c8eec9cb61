"""Shards that one rank gets alone where gathers are collectives of a library; see [Note: Scripts instead of rounds]."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.errors import PeerError
from shardwise.comm.group import Buffer, Group, Handle
from shardwise.comm.link import Link, Message
from shardwise.comm.serving import Served, Serving, Written
from shardwise.device import copy_ahead, on_device, on_stream, page_locked, record_event, side_stream, wait_event

__all__ = ["Asking"]

MOST_COPIES = 4
"""Of shards in page-locked memory that are kept for the next peer that asks."""


class Asking:
    """Of one group: a thread answers for this rank's shards, and this rank asks its peers'.

    Args:
        group: the ranks; its device is that of gathered arrays.
        link: over the same ranks, between their hosts.
    """

    def __init__(self, group: Group, link: Link) -> None:
        self._reader = _Reader(group.device)
        peers = [(group.rank + step) % group.size for step in range(1, group.size)]
        self._serving = Serving(link, peers, self._reader.times, self._reader.read, together=True)
        self._count = 0  # of buffers

    def serve(self, shards: Sequence[Buffer]) -> Served:
        """From now on peers may ask for them; all ranks serve theirs in one order."""
        for shard in shards:
            self._count += 1
            shard.number = self._count
        return self._serving.serve(shards)

    def written(self) -> None:
        """Shards have been written, by what the current stream has been given."""
        self._reader.written()

    def ask(self, group: Group, out: Tensor, shard: Buffer) -> Handle:
        """Every rank's shard into ``out``, with nobody else taking part. The host waits for the peers' hosts alone."""
        parts = {peer: group.slice_of(out, peer, shard.bounds) for peer in range(group.size)}
        own = parts.pop(group.rank)
        if out.device.type != "cuda":
            own.copy_(shard.local)
            return _Answer(self._ask(shard, parts, out), {})
        arrived = {peer: page_locked(part.shape, part.dtype) for peer, part in parts.items()}
        copies = [(part, arrived[peer]) for peer, part in parts.items()]
        if shard.local.device.type == "cpu":  # the host would wait for the device, to copy other memory to it
            staged = page_locked(own.shape, own.dtype)
            staged.copy_(shard.local)
            copy_ahead(own, staged)
        else:
            own.copy_(shard.local)
        return _Answer(self._ask(shard, arrived, out), dict(enumerate(copies)))

    def _ask(self, shard: Buffer, parts: dict[int, Tensor], out: Tensor) -> list[Message]:
        what = f"a gather by one rank of {out.numel()} x {out.dtype}, buffer {shard.number}"
        return self._serving.ask(shard, parts.__getitem__, what, behind=self._reader.times.updates)

    def close(self) -> None:
        """See :meth:`Serving.close`."""
        self._serving.close()


@dataclass(frozen=True)
class _Copy:
    """A shard's values in the host's memory, as so many updates have left them."""

    shard: weakref.ref[Tensor]
    updates: int
    values: Tensor


# Who asks has made as many updates as it says. A rank that is in the midst of the last of them answers behind it, and
# gets there by itself: all ranks have met before any began it. Several peers that leave a script ask for one shard, one
# after the other: between two updates it is copied once.
class _Reader:
    """What the thread that answers knows: where the device's shards are, and since when they have their values.

    Attributes:
        times: how often shards have been written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, side_stream(device)
        self._written: torch.cuda.Event | None = None
        self.times = Written()
        self._copies: tuple[_Copy, ...] = ()  # replaced as a whole: two threads do

    def written(self) -> None:
        """They have been, by what the current stream has been given."""
        if self._stream is not None:
            self._written = record_event(self._device)
        self._copies = ()
        self.times.through(self.times.updates + 1)

    def read(self, shard: Tensor) -> Tensor:
        """Its values in the host's memory, as the last update has left them, whatever the device is doing now."""
        if shard.device.type == "cpu" or self._stream is None:
            return shard
        updates = self.times.updates
        valid = [each for each in self._copies if each.updates == updates and each.shard() is not None]
        for each in valid:
            if each.shard() is shard:
                return each.values
        with on_device(self._device), on_stream(self._stream):
            if self._written is not None:
                wait_event(self._device, self._written)
            out = page_locked(shard.shape, shard.dtype)
            copy_ahead(out, shard)
            done = record_event(self._device)
        done.synchronize()
        # If it was written meanwhile, the copy is of a later update than it says, which nobody asks for any more.
        self._copies = (*valid, _Copy(weakref.ref(shard), updates, out))[-MOST_COPIES:]
        return out


class _Answer:
    """Parts that are on their way from the peers' hosts."""

    def __init__(self, messages: list[Message], copies: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._messages, self._copies = messages, copies

    def finished(self) -> bool:
        return not self._messages and not self._copies

    def wait(self) -> None:
        while self._messages:
            try:
                self._messages[0].wait()
            except PeerError:
                self._drop()
                raise
            self._messages.pop(0)
        while self._copies:
            number, (part, arrived) = next(iter(self._copies.items()))
            copy_ahead(part, arrived)
            del self._copies[number]  # torch keeps page-locked memory until the copy is done

    def _drop(self) -> None:
        """Nothing of it may be written into memory with another use."""
        self._copies = {}
        messages, self._messages = self._messages, []
        for message in messages:
            with suppress(PeerError):
                message.wait()
