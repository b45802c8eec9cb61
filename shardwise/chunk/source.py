"""Where a chunk's shard is at home, and how it gets from there into a gathered array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.comm import DONE, Buffer, Group, Handle
from shardwise.memory.disk import DiskError, DiskStore, Record
from shardwise.memory.tier import Tier

__all__ = ["DiskSource", "MemorySource", "ReadAhead", "ShardSource"]


class ShardSource(Protocol):
    """The home of one shard."""

    tier: Tier
    peers_take_part: bool
    """A gather needs every rank, even where the group's own gathers do not."""

    @property
    def exchange(self) -> Buffer:
        """The memory that peers read, long-lived."""

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        """The shard in memory inside the block; with ``write`` changes to it are kept."""

    def prepare(self) -> None:
        """A gather comes soon: start what can be done without the peers."""

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        """Every rank's shard in rank order into ``out`` (1-D, on the device)."""


class MemorySource:
    """In the device's or the host's memory.

    Args:
        exchange: the memory.
        tier: whose it is.
    """

    peers_take_part = False

    def __init__(self, exchange: Buffer, tier: Tier) -> None:
        self._exchange, self.tier = exchange, tier

    @property
    def exchange(self) -> Buffer:
        return self._exchange

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        yield self._exchange.local

    def prepare(self) -> None:
        """Nothing to do."""

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        local = self._exchange.local
        if local.device == out.device or group.size == 1:
            return group.all_gather(out, self._exchange)
        staged = Buffer(local.to(out.device, non_blocking=True))
        return _Keeping(group.all_gather(out, staged), staged)


class _Keeping:
    """A handle that keeps what its operation reads alive."""

    def __init__(self, handle: Handle, kept: object) -> None:
        self._handle, self._kept = handle, kept

    def finished(self) -> bool:
        return self._handle.finished()

    def wait(self) -> None:
        self._handle.wait()
        self._kept = None


@dataclass
class ReadAhead:
    """How many shards have been read ahead of their use, and how many may be."""

    limit: int
    count: int = 0


class DiskSource:
    """On a disk; one of the store's buffers holds it while it is gathered or changed.

    Args:
        store: the rank's store, with buffers of at least the shard's size.
        record: the shard's place in it.
        numel: elements of the shard.
        dtype: of the shard.
        staging: exchange memory of at least ``numel`` elements, shared by all such chunks; ``None`` on one rank.
        ahead: how many such shards are read ahead, and may be; shared by all such chunks.
    """

    tier = Tier.DISK

    def __init__(
        self,
        store: DiskStore,
        record: Record,
        numel: int,
        dtype: torch.dtype,
        staging: Buffer | None,
        ahead: ReadAhead,
    ) -> None:
        self.store, self.record, self._shared = store, record, ahead
        self._numel, self._dtype, self._staging = numel, dtype, staging
        self._nbytes = numel * dtype.itemsize
        self._ahead: tuple[torch.Tensor, Handle] | None = None
        self._written = False
        self.peers_take_part = staging is not None

    @property
    def exchange(self) -> Buffer:
        raise RuntimeError(f"a shard at home on the {self.tier.value} has no memory of its own; report this")

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[: self._nbytes].view(self._dtype)

    def _read(self) -> tuple[torch.Tensor, Handle]:
        started, self._ahead = self._ahead, None
        if started is not None:
            self._shared.count -= 1
            return started
        buffer = self.store.buffer(self._nbytes)
        if not self._written:  # first values are about to be put in
            buffer.zero_()
            return buffer, DONE
        return buffer, self.store.read(self.record, buffer, newest=True)

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        # A shard that was read ahead is taken here, so nothing out of date remains after a write.
        buffer, reading = self._read()
        try:
            reading.wait()
            yield self._view(buffer)
            if write:
                self.store.write(self.record, buffer).wait()
                self._written = True
        finally:
            self.store.give(buffer)

    def prepare(self) -> None:
        if self._ahead is None and self._written and self._shared.count < self._shared.limit:
            self._ahead = self._read()
            self._shared.count += 1

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        buffer, reading = self._read()
        if self._staging is None:
            return _FromDisk(self.store, buffer, reading, self._view(buffer), out)
        failure: DiskError | None = None
        try:
            reading.wait()
            self._staging.wait_writable()
            self._staging.resize(self._numel)
            self._staging.local.copy_(self._view(buffer))
        except DiskError as error:
            failure = error
        finally:
            self.store.give(buffer)
        # A rank that cannot read tells the others, which would wait for it; and all shards are in place after this.
        posts = group.exchange([float(failure is None)], "whether a shard could be read from the disk")
        if failure is not None:
            raise failure
        if not all(post[0] for post in posts):
            ranks = [rank for rank, post in enumerate(posts) if not post[0]]
            raise DiskError(f"{self.record.name}: ranks {ranks} of {group.name} could not read it; see their messages")
        group.all_gather(out, self._staging).wait()
        group.fence()
        return DONE


class _FromDisk:
    """A read that ends in the gathered array of a single rank."""

    def __init__(
        self, store: DiskStore, buffer: torch.Tensor, reading: Handle, shard: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._store, self._buffer, self._reading = store, buffer, reading
        self._shard: torch.Tensor | None = shard
        self._out = out

    def finished(self) -> bool:
        return self._shard is None or self._reading.finished()

    def wait(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            try:
                self._reading.wait()
                self._out.copy_(shard)
            finally:
                self._store.give(self._buffer)
